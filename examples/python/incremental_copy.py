#!/usr/bin/env python3
"""Copy the pages that changed since the last run: incremental_copy.py FILE TARGET"""
import os, socket, sys

import grpc
from fdmap.v1 import fdpass_pb2 as fdpass, tracking_pb2 as pb, tracking_pb2_grpc, types_pb2

DIR, CURSOR = os.environ.get("FDMAP_RUNTIME_DIR", "/run/fdmap"), "incremental-copy"
file, target = types_pb2.FileRef(name=sys.argv[1]), sys.argv[2]


def open_source():
    """The page size in bytes, and a read-only descriptor of the file from the fdpass socket."""
    session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    session.connect(f"{DIR}/fdpass.sock")
    hello = fdpass.Hello(version=1, client="incremental_copy.py")
    session.send(fdpass.FdpassRequest(hello=hello).SerializeToString())
    page_size = fdpass.FdpassReply.FromString(session.recv(65536)).welcome.page_size
    request = fdpass.Open(file=file, mode=fdpass.Open.MODE_READ_ONLY)
    session.send(fdpass.FdpassRequest(open=request).SerializeToString())
    return page_size, socket.recv_fds(session, 65536, 1)[1][0]


options = [("grpc.default_authority", "localhost")]  # see README.md
with grpc.insecure_channel(f"unix:{DIR}/fdmap.sock", options=options) as channel:
    tracking = tracking_pb2_grpc.TrackingStub(channel)
    if CURSOR not in [c.name for c in tracking.ListCursors(pb.ListCursorsRequest(file=file)).cursors]:
        tracking.CreateCursor(pb.CreateCursorRequest(file=file, name=CURSOR))
    begun = tracking.BeginCursor(pb.BeginCursorRequest(file=file, name=CURSOR)).cursor
    (page_size, source), out = open_source(), os.open(target, os.O_WRONLY | os.O_CREAT, 0o600)
    for message in tracking.Changes(pb.ChangesRequest(file=file, cursor=CURSOR)):
        at = message.runs.first_page * page_size
        for skip, length in zip(message.runs.skips, message.runs.lengths):
            at, end = at + skip * page_size, at + (skip + length) * page_size
            while at < end and (content := os.pread(source, min(end - at, 1 << 20), at)):
                at += os.pwrite(out, content, at)
            at = end
    os.fsync(out)
    tracking.CommitCursor(pb.CommitCursorRequest(file=file, name=CURSOR, generation=begun.until_generation))
