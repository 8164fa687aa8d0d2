"""What is there: the headers of safetensors files and their bytes, the blocks of a component in numbers, and the forms
in which weights are stored. Nothing here decides where a weight goes.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "safetensors_header": ["TensorHeader", "WeightsHeader", "open_regular", "read_header"],
        "untrusted_config": ["check_config", "declared_items", "parse_config", "read_config_file", "walk_items"],
        "file_origin": ["FileIdentity", "Origin", "differs"],
        "file_reader": ["OpenFiles", "Target", "WeightsFile", "bytes_of", "count_cached_threads", "torch_dtype"],
        "blocks": ["LARGEST_NON_BLOCK_SHARE"],
        "sharing": ["NOTHING_SHARED", "Shared", "find_shared", "named_tensors"],
        "known_errors": ["MeasuredFile", "note_errors", "read_errors", "remember_errors_in"],
        "component": ["Block", "Component", "TensorSpec", "component_from_files", "guess_kind"],
        "gguf_header": ["component_from_gguf", "is_gguf"],
        "form_numbers": ["AS_THEY_CAME", "FormNumbers", "Forms", "rests_of"],
        "storage_form": ["AS_STORED", "EncodedForm", "StorageForm"],
        "side_factors": ["SideFactors", "add_product"],
        "known_forms": ["FORMS", "encoded_form", "forms_in_file", "numbers_of"],
        "movable": ["has_packed_weights", "is_packed", "why_not_movable"],
        "quantized_leaves": ["PackedForm", "Wrapper", "form_of", "leaves_of"],
        "module_component": ["SAFETENSORS_NAMES", "component_from_module", "is_callable", "leaf_bytes"],
        "layers": ["cut_into_layers"],
        "page_cache": ["find_heap_trim"],
        "tensor_holders": ["CAN_COUNT", "count_tensors", "find_held_elsewhere"],
        "loading": ["Loading"],
        "casting": ["NUM_AT_A_TIME", "can_cast", "cast_into", "convert_in_place", "stored_begin"],
        "stored_encodings": ["StoredEncoding", "leaf_name", "renamed", "weight_name"],
        "source": ["WeightsSource"],
        "file_layouts": [
            "FILE_FORMS",
            "FileTensor",
            "describe_for_host",
            "describe_foreign",
            "describe_quantized",
            "is_quanto",
            "file_tensors",
            "in_base64",
            "layout_metadata",
        ],
        "file_writer": ["FileWriter", "refuse_existing"],
        "form_errors": ["measure_error", "measure_errors"],
        "mapped_files": ["find_sources", "map_again", "map_own", "map_tensors", "may_be_written"],
        "discovery": ["components_of", "discover_components", "holds_pipeline"],
    },
)
