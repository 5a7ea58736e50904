"""The memory that this process has allocated, as glibc counts it."""

import ctypes


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten counts, of which two are in-use and mmapped bytes."""

    _fields_ = (
        ("_free_and_total", ctypes.c_size_t * 4),
        ("mmapped", ctypes.c_size_t),
        ("_unused", ctypes.c_size_t * 2),
        ("in_use", ctypes.c_size_t),
        ("_free", ctypes.c_size_t * 2),
    )


def allocated_bytes() -> int:
    """Bytes that the process has allocated and not freed, as glibc counts them."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo2
    info = libc.mallinfo2()
    return int(info.in_use + info.mmapped)


def keep_freed_pages() -> None:
    """Let glibc keep freed memory, as accelerators' allocators do.

    By default it returns pages to the kernel and faults them in again; which contender
    pays for that depends on what ran before it, not on what it does.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_mmap_threshold, 2**30)
