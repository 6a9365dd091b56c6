// Where the parts of a tile begin (classes/layout.py): after the codes, what K has in its tiles.
//
// Expects D, K_TILES, K_SMALL and classes/widths.cuh.
#define VALUES_AT (128 * Keys::WORDS)
#define ZEROS_AT (VALUES_AT + 128 * Values::WORDS)
#define PARAMETER_BYTES (K_SMALL ? 1 : 2)
#define SCALES_AT (ZEROS_AT + PARAMETER_BYTES * D)
#define CHANNELS_AT (SCALES_AT + PARAMETER_BYTES * 16 * Keys::COLUMNS)
#define EXPONENTS_AT (CHANNELS_AT + 16 * Keys::COLUMNS)
#define STORED_TILE_BYTES (K_TILES ? EXPONENTS_AT + 16 * K_SMALL : ZEROS_AT)
