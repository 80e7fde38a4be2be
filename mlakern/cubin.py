"""What the ELF header of a cubin says about the hardware it runs on.

Only the header is read, with the standard library: the store checks it on every load. The build
reads the rest of the file (mlakern.build.cubin_facts).
"""

from __future__ import annotations

import re
import struct

# ELF: e_ident, then e_type, e_machine, e_version, e_entry, e_phoff, e_shoff, e_flags.
_HEADER = struct.Struct("<16sHHIQQQI")
_EM_CUDA = 190
_CUDA_ABI = 8


class CubinError(ValueError):
    """Bytes that are not a cubin this package can read."""


def multiprocessor_version(image: bytes) -> int:
    """The multiprocessor version a cubin is for, for instance 100 (sm_100 and sm_100a alike).

    In CUDA's ELF ABI 8 (toolkit 13) bits 8 to 15 of e_flags hold it; the accelerated variants
    (``a``) have no bit of their own. Checked with ptxas 13.0 and 13.4 from sm_90 to sm_120.
    """
    if len(image) < _HEADER.size or not image.startswith(b"\x7fELF\x02\x01"):
        raise CubinError(f"cubin: got {image[:6]!r}, need a little-endian 64-bit ELF file")
    ident, _, machine, _, _, _, _, flags = _HEADER.unpack_from(image)
    if machine != _EM_CUDA:
        raise CubinError(f"cubin: ELF machine is {machine}, need {_EM_CUDA} (CUDA)")
    if ident[8] != _CUDA_ABI:
        raise CubinError(f"cubin: CUDA ELF ABI is {ident[8]}, need {_CUDA_ABI} (toolkit 13)")
    return int(flags >> 8 & 0xFF)


def version_of_arch(arch: str) -> int:
    """The multiprocessor version of an architecture name: sm_103a gives 103."""
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise CubinError(f"architecture: got {arch!r}, need a name like sm_100a")
    return int(match[1])
