"""The public names of torchmonarch 0.7.0."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# monarch.actor.__all__
ACTOR = _words("""
Accumulator Actor ActorError current_actor_name as_endpoint current_rank current_size concurrent_endpoint endpoint
Future returns_future Point ProcMesh ProcId Channel send shutdown_context ValueMesh debug_controller
get_or_spawn_controller this_host this_proc default_bootstrap_cmd HostMesh context Port PortReceiver Endpoint Extent
run_worker_loop_forever run_worker_loop_until_shutdown start_worker_loop_forever attach_to_workers attach
enable_transport Context ChannelTransport unhandled_fault_hook MeshFailure config get_meter span traced Uid
""")
# What its users import from private modules.
HIDDEN = _words("""
ActorMesh SupervisionError BootstrapCommand Shape Slice Region NDSlice UndeliverableMessageEnvelope WouldBlockRuntime
""")
# monarch.__all__
TOP = _words("""
coalescing clear_runtime_config configure configured get_global_config get_runtime_config remote get_active_mesh no_mesh
RemoteProcessGroup function_resolvers Extent Future Shape NDSlice Selection OpaqueRef get_active_stream Stream Tensor
reduce reduce_ to_mesh slice_mesh call_on_shard_and_fetch fetch_shard inspect show grad_function grad_generator
mast_reserve set_meta Simulator world_mesh timer ActorFuture builtins
""")
# monarch.config.__all__
CONFIG = _words("""
clear_runtime_config configure configured Encoding get_global_config get_runtime_config parametrize_config
parametrize_config_pointwise
""")
RDMA = _words("""
RDMABuffer RDMAAction is_ibverbs_available is_rdma_available get_rdma_backend RDMAReadTransferWarning
RDMAWriteTransferWarning RDMATcpFallbackWarning
""")
JOB = _words("""
JobTrait JobState LocalJob ProcessJob SlurmJob KubernetesJob ImageSpec KubeConfig job_load job_loads set_current_job
load_current_job exec_command shell PortForwarder TelemetryConfig MeshAdminConfig hosts_from_config
DEFAULT_JOB_PATH SERVICE_PROC_IDS_ENV SERVICE_PROC_RANK_ENV deserialize_service_proc_ids new_service_proc_id
ranked_service_proc_id_from_env serialize_service_proc_ids service_proc_addr service_proc_addrs spmd.SPMDJob
spmd.StoreJob spmd.serve
""")
SPMD = _words("SPMDActor setup_torch_elastic_env setup_torch_elastic_env_async")
