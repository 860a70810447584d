"""Names that belong to others: a check needs no import of theirs, and tests compare."""

_TRANSFORMER = """
    patch_size num_attention_heads attention_head_dim in_channels out_channels text_dim freq_dim ffn_dim
    num_layers cross_attn_norm qk_norm eps image_dim added_kv_proj_dim rope_max_seq_len pos_embed_seq_len
"""

_TRANSFORMER_OTHERS = "patch_size cross_attn_norm qk_norm eps image_dim added_kv_proj_dim pos_embed_seq_len"

_ZERO = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
    offload_param offload_optimizer zenflow sub_group_size stage3_prefetch_bucket_size
    prefetch_bucket_size stage3_param_persistence_threshold param_persistence_threshold
    stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters
    max_live_parameters stage3_max_reuse_distance max_reuse_distance
    stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
    stage3_module_granularity_threshold module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential
    allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
    zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
"""

_ZERO_SWITCHES = """
    contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
    compute_grad_norm load_from_fp32_weights stage3_gather_16bit_weights_on_model_save
    gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params
    use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential
    ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
    zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
    enable_sanity_checks save_muon_momentum_buffer_in_memory
"""

_OFFLOAD_OPTIMIZER = """
    device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
    cpuadam_cores_perc
"""

_OFFLOAD_PARAM = """
    device nvme_path buffer_count buffer_size max_in_cpu pin_memory
"""

TRANSFORMER_KEYS = frozenset(_TRANSFORMER.split())  # arguments of diffusers.WanTransformer3DModel

TRANSFORMER_COUNTS = TRANSFORMER_KEYS - frozenset(_TRANSFORMER_OTHERS.split())

# fields and aliases of DeepSpeed's DeepSpeedZeroConfig, without the deprecated and the refused ones
ZERO_KEYS = frozenset(_ZERO.split())
ZERO_SWITCHES = frozenset(_ZERO_SWITCHES.split())  # those of them that are true or false
OFFLOAD_KEYS = {
    "offload_optimizer": frozenset(_OFFLOAD_OPTIMIZER.split()),
    "offload_param": frozenset(_OFFLOAD_PARAM.split()),
}

_SPLIT = """
    context_parallel context_parallel_size cp cp_degree cp_size sequence_parallel sequence_parallel_size sp
    sp_degree ulysses_degree ulysses_size
"""

# what other trainers call a setting of ours
OTHER_NAMES = dict.fromkeys(_SPLIT.split(), "parallelism.sp_size") | {
    "activation_checkpointing": "parallelism.recompute",
    "attn_implementation": "model.attention",
    "gradient_checkpointing": "parallelism.recompute",
    "torch_compile": "train.compile",
}

_MICS = "MiCS is not supported; zero_hpz_partition_size keeps gathers inside a node"
REFUSED_ZERO_KEYS = {
    "elastic_checkpoint": "checkpoints of another world size are not read this way",
    "sequence_parallel_size": "the mesh is ours; set parallelism.sp_size",
    "data_parallel_size": "the mesh is ours; it is the number of ranks over parallelism.sp_size",
    "mesh_param": "the mesh is ours; set parallelism.sp_size",
    "mesh_device": "the mesh is ours; set parallelism.sp_size",
    "mics_shard_size": _MICS,
    "mics_hierarchical_params_gather": _MICS,
}
