"""What happens in a forward: passes, hooks, copies of arguments between devices, backward passes, failures."""

from ...lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "device_hops": ["DeviceHops", "Visit"],
        "input_size": ["Size"],
        "recording_pauses": ["host_recordings"],
        "deferring_lock": ["DeferringLock"],
        "forward_pass": ["ComponentManager", "FailedTry", "Guest", "Hold", "NoManager", "Pass", "Passes"],
        "compiled_blocks": ["CompiledBlocks"],
        "module_caches": ["ModuleCaches", "address_of", "at_home", "computed_weights"],
        "execution_order": ["in_execution_order"],
        "hooked_modules": ["HookedModules", "block_modules", "modules_holding"],
        "micro_batches": ["MicroBatches", "why_one_by_one"],
        "forward_blocks": ["Forwards"],
        "forward_hooks": ["ForwardHooks", "remove_hooks_of"],
        "device_answers": ["DeviceAnswers"],
    },
)
