"""The seven system calls the CPU twin needs; Python's own mmap cannot map at a chosen address."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from kvtide.errors import DeviceError

PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MREMAP_MAYMOVE_FIXED_DONTUNMAP = 0x1 | 0x2 | 0x4
FALLOC_FL_KEEP_SIZE = 0x1
FALLOC_FL_PUNCH_HOLE = 0x2
_NOWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
_TABLE_BYTES = 2 << 20
"""What one page table of the processor spans: aligned to it, a whole table moves at once."""

_FAILED = ctypes.c_void_p(-1).value
_CURES = {
    errno.ENOMEM: "raise vm.max_map_count or the address space (ulimit -v), or use larger granules",
    errno.EMFILE: "raise the limit of open files (ulimit -n) or close memories no longer used",
    errno.EFBIG: "lower num_bytes or raise the file-size limit (ulimit -f)",
}


def _load() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, address, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_int64)
    libc.mmap.restype = address
    libc.munmap.argtypes = (address, size)
    libc.munmap.restype = number
    libc.mremap.argtypes = (address, size, size, number, address)
    libc.mremap.restype = address
    libc.fallocate.argtypes = (number, number, ctypes.c_int64, ctypes.c_int64)
    libc.fallocate.restype = number
    return libc


_LIBC = _load()


def page_bytes() -> int:
    """Smallest piece the system can map."""
    return mmap.PAGESIZE


def create_file(name: str, num_bytes: int) -> int:
    """Descriptor of an anonymous sparse file; memory is used only where it is written."""
    if not hasattr(os, "memfd_create"):
        raise DeviceError("memfd memory needs Linux; use NullMemory, which keeps books only")
    try:
        fd = os.memfd_create(name)
    except OSError as error:
        raise _refused(f"memfd_create({name!r})", error.errno or 0) from error
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        raise _refused(f"ftruncate to {num_bytes} bytes", error.errno or 0) from error
    return fd


def reserve(num_bytes: int) -> int:
    """Address of a range in which every touch faults, a multiple of 2 MiB."""
    found = _mmap(None, num_bytes + _TABLE_BYTES, PROT_NONE, flags=_NOWHERE)
    address = -(-found // _TABLE_BYTES) * _TABLE_BYTES
    spare = found + _TABLE_BYTES - address
    for start, length in ((found, address - found), (address + num_bytes, spare)):
        if length:
            release(start, length)
    return address


def release(address: int, num_bytes: int) -> None:
    """Give a reserved range back, with whatever is mapped in it."""
    if _LIBC.munmap(address, num_bytes) != 0:
        raise _refused(f"munmap of {num_bytes} bytes", ctypes.get_errno())


def map_file(address: int, num_bytes: int, *, fd: int, offset: int) -> None:
    """Show bytes [offset, offset + num_bytes) of the file at `address`, readable and writable."""
    _mmap(
        address,
        num_bytes,
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags=mmap.MAP_SHARED | MAP_FIXED,
        fd=fd,
        offset=offset,
    )


def carry(source: int, target: int, num_bytes: int) -> bool:
    """Have the part of a file mapped at `source` be seen at `target`, with the pages it is made of
    already, so that no touch has to find each of them again; False if the system cannot.

    `source` goes on showing the same part. After a False `target` has to be mapped anew.
    """
    how = MREMAP_MAYMOVE_FIXED_DONTUNMAP
    return bool(_LIBC.mremap(source, num_bytes, num_bytes, how, target) == target)


def map_nothing(address: int, num_bytes: int) -> None:
    """Make every touch of the range fault; the range stays reserved."""
    _mmap(address, num_bytes, PROT_NONE, flags=_NOWHERE | MAP_FIXED)


def punch(fd: int, offset: int, num_bytes: int) -> None:
    """Give the memory behind a part of the file back; the part reads as zeros from now on."""
    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    if _LIBC.fallocate(fd, mode, offset, num_bytes) != 0:
        raise _refused(f"fallocate to punch out {num_bytes} bytes", ctypes.get_errno())


def _mmap(
    address: int | None,
    num_bytes: int,
    protection: int,
    *,
    flags: int,
    fd: int = -1,
    offset: int = 0,
) -> int:
    result = _LIBC.mmap(address, num_bytes, protection, flags, fd, offset)
    if result is None or result == _FAILED:
        raise _refused(f"mmap of {num_bytes} bytes", ctypes.get_errno())
    return int(result)


def _refused(what: str, code: int) -> DeviceError:
    cure = _CURES.get(code)
    return DeviceError(code, f"{what} failed: {os.strerror(code)}" + (f"; {cure}" if cure else ""))
