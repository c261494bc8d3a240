"""The subprocess of `shim.Runner`: loads one library, answers calls on stdin/stdout (pickles).

It starts without site packages and keeps every array in its own allocation of AddressSanitizer's,
which ends exactly where the array does.
"""

import ctypes
import os
import pickle
import sys

GUARD = 0xA5

libc = ctypes.CDLL(None)
libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


class Memory:
    """A copy of one region: `offset` guard bytes, then the data."""

    def __init__(self, offset, data):
        self.offset, self.data = offset, data
        base = ctypes.c_void_p()
        if libc.posix_memalign(ctypes.byref(base), 256, offset + len(data)) != 0:
            raise MemoryError
        self.base = base.value
        ctypes.memset(self.base, GUARD, offset)
        ctypes.memmove(self.base + offset, data, len(data))

    @property
    def address(self):
        return self.base + self.offset

    def changed(self):
        """The data if the call changed it, else None; frees the memory."""
        guard = ctypes.string_at(self.base, self.offset)
        data = ctypes.string_at(self.address, len(self.data))
        libc.free(self.base)
        if guard != bytes([GUARD]) * self.offset:
            raise ValueError("bytes before an array were overwritten")
        return None if data == self.data else data


def convert(argument, memories, keep):
    kind = argument[0]
    if kind == "region":
        return ctypes.c_void_p(memories[argument[1]].address + argument[2])
    if kind == "struct":
        data = bytearray(argument[1])
        for offset, region, inside in argument[2]:
            address = memories[region].address + inside
            data[offset : offset + 8] = address.to_bytes(8, sys.byteorder)
        keep.append(Memory(0, bytes(data)))
        return ctypes.c_void_p(keep[-1].address)
    return getattr(ctypes, kind)(argument[1])


def call(library, request):
    memories = [Memory(offset, data) for offset, data in request["regions"]]
    keep = []
    order, max_groups, stream, major, minor, multiprocessors = request["settings"]
    library.minidecode_shim_configure(
        ctypes.c_int(order),
        ctypes.c_long(max_groups),
        ctypes.c_void_p(stream),
        ctypes.c_int(major),
        ctypes.c_int(minor),
        ctypes.c_int(multiprocessors),
    )
    for region, offset, size in request["late"]:
        library.minidecode_shim_late(
            ctypes.c_void_p(memories[region].address + offset), ctypes.c_size_t(size)
        )
    arguments = [convert(argument, memories, keep) for argument in request["args"]]
    status = getattr(library, request["function"])(*arguments)
    for structure in keep:
        if structure.changed() is not None:
            raise ValueError("the call changed its argument structure")
    return {
        "status": status,
        "regions": [memory.changed() for memory in memories],
        "launches": library.minidecode_shim_launches(),
    }


def main():
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints goes to the log
    library = ctypes.CDLL(sys.argv[1])
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if "has" in request:
                reply = {"has": hasattr(library, request["has"])}
            else:
                reply = call(library, request)
        except (AttributeError, ValueError) as error:
            reply = {"error": str(error)}
        pickle.dump(reply, replies)
        replies.flush()


main()
