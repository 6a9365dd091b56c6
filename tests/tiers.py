"""Of which rules the default tier has few cases: one of so many; the others are slow tests.

Keys are paths below tests/ without their suffix. A number and the count of what varies fastest
should share no factor: one of three cases would always have the same one of three sizes.
"""

ONE_OF = {
    # Compiled for a GPU, or by g++ and run on the CPU: a second or two each.
    "attention/cuda/classes/test_compile::test_class_decode_compiles": 2,
    "attention/cuda/classes/test_compile::test_class_decode_compiles_without_groups_of_k": 5,
    "attention/cuda/classes/test_query_on_cpu::test_digits_are_those_of_the_lanes": 5,
    "attention/cuda/test_compile::test_dense_decode_compiles": 7,
    "attention/cuda/dense/test_decode_on_cpu::test_matches_the_reference": 3,
    "attention/cuda/groups/test_levels_on_cpu::test_lanes_read_levels_to_one_rounding": 5,
    "attention/cuda/shared/test_in_turn::test_every_kernel_with_a_ring_compiles_both_ways": 3,
    "attention/cuda/dense/test_decode_on_cpu::test_records_may_be_longer_or_more": 4,
    "attention/cuda/test_compile::test_group_decode_compiles": 3,
    "attention/cuda/test_compile::test_group_decode_compiles_for_codes_apart": 3,
    "attention/cuda/test_compile::test_group_decode_compiles_without_bulk_copies": 3,
    "attention/cuda/test_compile::test_span_decode_compiles_and_is_kept": 2,
    "attention/cuda/test_compile::test_span_decode_compiles_without_bulk_copies": 3,
    "attention/cuda/test_compile::test_span_calibrated_compiles_and_takes_what_is_planned": 5,
    "attention/cuda/test_compile::test_turns_compile": 7,
    "attention/cuda/packing/test_compile::test_class_pack_compiles": 3,
    "attention/cuda/packing/test_compile::test_group_pack_compiles": 3,
    "attention/cuda/packing/test_compile::test_levels_compile": 5,
    "attention/cuda/packing/test_compile::test_span_pack_compiles": 3,
    "attention/cuda/packing/test_pack_on_cpu::test_classes": 3,
    "attention/cuda/packing/test_pack_on_cpu::test_groups": 3,
    "attention/cuda/packing/test_pack_on_cpu::test_spans": 5,
    "attention/cuda/rotate/test_queries_on_cpu::test_parts_leave_their_basis": 4,
    "attention/cuda/rotate/test_queries_on_cpu::test_rows_meet_the_matrix_of_their_head": 4,
    "attention/cuda/shared/test_units_on_cpu::test_every_unit_is_done_once": 5,
    "attention/test_explain::test_explains_what_a_cache_gets": 3,
    # Interpreted kernels.
    "attention/test_large_keys::test_triton_reads_them": 3,
    "bench/test_innerq::test_products_equal_torchs": 5,
    "attention/triton/test_decode::test_matches_the_reference": 3,
    # Products of formats, sizes and orders.
    "attention/cuda/classes/test_layout::test_records_are_an_exact_inverse": 7,
    "attention/test_large_keys::test_outputs_are_those_of_the_store": 5,
    "planning/test_memory::test_a_plan_predicts_what_the_cache_holds": 3,
    "attention/test_reference::test_packed_segment": 4,
    "quantize/test_run::test_few_bit_caches_under_few_bit_weights": 2,
    "cache/test_runs::test_a_run_keeps_the_average_of_its_layers_codes": 5,
    # Kinds of files.
    "hf/test_saved::test_a_model_from_a_folder_is_the_model_that_was_saved_there": 5,
    "hf/test_saved::test_every_tensor_is_needed_in_its_type_and_shape": 4,
    "hf/test_saved::test_headers_of_other_kinds_are_refused": 4,
    "hf/test_saved::test_running_a_model_does_not_change_its_configuration": 5,
    "hf/test_saved::test_what_is_saved_loads_after_every_operation": 4,
    # Products of model families and policies: each family has cases.
    "hf/test_autocast::test_autocast_may_begin_and_end_between_steps": 5,
    "hf/test_autocast::test_every_scheme_runs": 4,
    "hf/test_background::test_the_order_of_tokens_changes_nothing": 3,
    "quantize/test_compressed_tensors::test_every_family_comes_back_with_its_logits": 5,
    "quantize/test_compressed_tensors::test_its_own_loader_finds_the_same_weights": 5,
    "hf/test_bases::test_8_bit_tokens_agree": 2,
    "hf/test_bases::test_a_change_of_basis_changes_nothing": 2,
    "hf/test_eviction::test_what_stays_is_quantized_by_any_scheme": 2,
    "hf/test_generate::test_8_bit_tokens_agree": 3,
    "hf/test_generate::test_decoding_modes": 3,
    "hf/test_generate::test_exact_codec_reproduces_16_bit": 2,
    "hf/test_generate::test_second_turn_with_another_image": 2,
    "hf/test_memory::test_frozen_caches": 3,
    "hf/test_ragged_rows::test_a_row_of_a_batch_is_the_row_alone": 7,
    "hf/test_static::test_generates_as_the_growing_cache": 4,
}
