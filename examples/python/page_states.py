#!/usr/bin/env python3
"""Print how many pages of a file are in which state: page_states.py [USER/]FILE"""
import collections
import os
import pwd
import sys

import grpc
from fdmap.v1 import pages_pb2, pages_pb2_grpc, types_pb2

STATES = ("hole", "swapped", "resident", "unknown")  # by bits 63 and 62 of an entry


def connect():
    directory = os.environ.get("FDMAP_RUNTIME_DIR", "/run/fdmap")
    # By default gRPC sends the socket's path as :authority, which the service refuses.
    options = [("grpc.default_authority", "localhost")]
    return grpc.insecure_channel(f"unix:{directory}/fdmap.sock", options=options)


def file_ref(text):
    """NAME is a file of the caller, USER/NAME one of any user, who is given by login name or uid."""
    user, slash, name = text.rpartition("/")
    if not slash:
        return types_pb2.FileRef(name=name)
    uid = int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid
    return types_pb2.FileRef(owned_name=types_pb2.OwnedName(uid=uid, name=name))


def page_states(channel, name):
    """One byte for each page: an index into STATES. numpy.frombuffer(result, "u1") copies nothing."""
    request = pages_pb2.ScanRequest(file=file_ref(name), encoding=pages_pb2.ENCODING_ENTRIES)
    states = bytearray()
    for message in pages_pb2_grpc.PagesStub(channel).Scan(request, timeout=60):
        if message.HasField("entries"):  # the first message is the header
            words = memoryview(message.entries.entries).cast("Q")
            states += bytes(word >> 62 for word in words)
    return bytes(states)


if __name__ == "__main__":
    with connect() as channel:
        counts = collections.Counter(page_states(channel, sys.argv[1]))
    for index, state in enumerate(STATES):
        print(state, counts[index])
