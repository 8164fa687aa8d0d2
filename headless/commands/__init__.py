"""What each command of ``highwater`` does, and what it prints and draws."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "console": ["Console"],
        "demo": ["choose_hardware", "run_demo"],
        "doctor": ["examine", "find_needs_files"],
        "hardware": ["simulate"],
        "keeping": ["keep", "kept_text", "limits_text", "release", "released_text", "set_limits"],
        "lending": ["give_back", "given_back_text", "lend", "lent_text"],
        "output": ["OUTPUT", "drop_output", "json_line", "open_output", "print_json"],
        "planning": ["plan_workflow", "refuse_picture", "write_picture"],
        "running_host": ["HostFailed", "ask"],
        "session": ["load_workflows", "make_runner", "run_workflow"],
        "verifying": ["verify_workflow"],
    },
)
