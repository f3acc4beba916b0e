"""Write crdt-v1.json, once: every later version reads it. `python tests/golden/make_crdt.py`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

_PLACE = Path(__file__).parent.parent / "crdt" / "test_laws.py"


def main() -> None:
    """Encode the samples of the tests."""
    spec = importlib.util.spec_from_file_location("test_laws", _PLACE)
    assert spec is not None
    assert spec.loader is not None
    laws = importlib.util.module_from_spec(spec)
    sys.modules["test_laws"] = laws
    spec.loader.exec_module(laws)
    golden = {name: state.encode().hex() for name, state in laws.SAMPLES.items()}
    (Path(__file__).parent / "crdt-v1.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
