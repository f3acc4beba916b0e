"""Make `buffered-op-v1.bin`: an operation with every type, as write buffers keep it.

Run it only for a new version; the old files stay.
"""

from __future__ import annotations

from pathlib import Path

from millstream.codec.buffered_op import VERSION, encode_op
from millstream.testing.write_buffer import every_kind_op

if __name__ == "__main__":
    (Path(__file__).parent / f"buffered-op-v{VERSION}.bin").write_bytes(encode_op(every_kind_op()))
