"""The engine: decide, record, move. Never imports ComfyUI. Read `memory/README.md` first."""
