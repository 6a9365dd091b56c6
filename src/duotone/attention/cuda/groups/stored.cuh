// Bytes of a tile that is packed: codes, then scales and zero-points.
//
// Expects D, TILE, KB, VB and
//   K_SEPARATE, V_SEPARATE  1: codes are not in the tile
//   K_MAPPING, V_MAPPING    see groups/packer.cuh
#define CODE_BYTES(BITS) (TILE * D * (BITS) / 8)
#define K_GROUPS (K_ALONG_K ? TILE * (D / K_GROUP) : D)
#define V_GROUPS (V_ALONG_K ? D : TILE * (D / V_GROUP))
#define K_PARAM_BYTES (K_GROUPS * (K_MAPPING ? 6 : 4))
#define V_PARAM_BYTES (V_GROUPS * (V_MAPPING ? 6 : 4))
#define K_OWN_BYTES (K_SEPARATE ? 0 : CODE_BYTES(KB))
#define V_OWN_BYTES (V_SEPARATE ? 0 : CODE_BYTES(VB))
#define STORED_TILE_BYTES (K_OWN_BYTES + V_OWN_BYTES + K_PARAM_BYTES + V_PARAM_BYTES)
