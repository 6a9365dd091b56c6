"""Of which rules the default tier has few cases: one of so many; the others are slow tests.

A number and the count of what varies fastest should share no factor: one of three cases would
always have the same one of three sizes.
"""

ONE_OF = {
    # Compiled for a GPU, or by g++ and run on the CPU: a second or two each.
    "test_cuda_class_compile::test_class_decode_compiles": 2,
    "test_cuda_class_compile::test_class_decode_compiles_without_groups_of_k": 5,
    "test_cuda_class_query_on_cpu::test_digits_are_those_of_the_lanes": 5,
    "test_cuda_compile::test_dense_decode_compiles": 7,
    "test_cuda_dense_on_cpu::test_matches_the_reference": 3,
    "test_cuda_group_levels_on_cpu::test_lanes_read_levels_to_one_rounding": 5,
    "test_cuda_in_turn::test_every_kernel_with_a_ring_compiles_both_ways": 3,
    "test_cuda_dense_on_cpu::test_records_may_be_longer_or_more": 4,
    "test_cuda_compile::test_group_decode_compiles": 3,
    "test_cuda_compile::test_group_decode_compiles_for_codes_apart": 3,
    "test_cuda_compile::test_group_decode_compiles_without_bulk_copies": 3,
    "test_cuda_compile::test_span_decode_compiles_and_is_kept": 2,
    "test_cuda_compile::test_span_decode_compiles_without_bulk_copies": 3,
    "test_cuda_compile::test_span_calibrated_compiles_and_takes_what_is_planned": 5,
    "test_cuda_compile::test_turns_compile": 7,
    "test_cuda_pack_compile::test_class_pack_compiles": 3,
    "test_cuda_pack_compile::test_group_pack_compiles": 3,
    "test_cuda_pack_compile::test_levels_compile": 5,
    "test_cuda_pack_compile::test_span_pack_compiles": 3,
    "test_cuda_pack_on_cpu::test_classes": 3,
    "test_cuda_pack_on_cpu::test_groups": 3,
    "test_cuda_pack_on_cpu::test_spans": 5,
    "test_cuda_turn_on_cpu::test_parts_leave_their_basis": 4,
    "test_cuda_turn_on_cpu::test_rows_meet_the_matrix_of_their_head": 4,
    "test_cuda_units_on_cpu::test_every_unit_is_done_once": 5,
    "test_explain::test_explains_what_a_cache_gets": 3,
    # Interpreted kernels.
    "test_large_keys::test_triton_reads_them": 3,
    "test_innerq::test_products_equal_torchs": 5,
    "test_triton_decode::test_matches_the_reference": 3,
    # Products of formats, sizes and orders.
    "test_cuda_class_layout::test_records_are_an_exact_inverse": 7,
    "test_large_keys::test_outputs_are_those_of_the_store": 5,
    "test_planning::test_a_plan_predicts_what_the_cache_holds": 3,
    "test_reference::test_packed_segment": 4,
    "test_run::test_few_bit_caches_under_few_bit_weights": 2,
    "test_runs::test_a_run_keeps_the_average_of_its_layers_codes": 5,
    # Kinds of files.
    "test_saved::test_a_model_from_a_folder_is_the_model_that_was_saved_there": 5,
    "test_saved::test_every_tensor_is_needed_in_its_type_and_shape": 4,
    "test_saved::test_headers_of_other_kinds_are_refused": 4,
    "test_saved::test_running_a_model_does_not_change_its_configuration": 5,
    "test_saved::test_what_is_saved_loads_after_every_operation": 4,
    # Products of model families and policies: each family has cases.
    "test_autocast::test_autocast_may_begin_and_end_between_steps": 5,
    "test_autocast::test_every_scheme_runs": 4,
    "test_background::test_the_order_of_tokens_changes_nothing": 3,
    "test_compressed_tensors::test_every_family_comes_back_with_its_logits": 5,
    "test_compressed_tensors::test_its_own_loader_finds_the_same_weights": 5,
    "test_bases::test_8_bit_tokens_agree": 2,
    "test_bases::test_a_change_of_basis_changes_nothing": 2,
    "test_eviction::test_what_stays_is_quantized_by_any_scheme": 2,
    "test_generate::test_8_bit_tokens_agree": 3,
    "test_generate::test_decoding_modes": 3,
    "test_generate::test_exact_codec_reproduces_16_bit": 2,
    "test_generate::test_second_turn_with_another_image": 2,
    "test_memory::test_frozen_caches": 3,
    "test_ragged_rows::test_a_row_of_a_batch_is_the_row_alone": 7,
    "test_static::test_generates_as_the_growing_cache": 4,
}
