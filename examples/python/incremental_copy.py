#!/usr/bin/env python3
"""Copy the pages that changed since the last run: incremental_copy.py [USER/]FILE TARGET"""
import os, pwd, socket, subprocess, sys

import grpc
from fdmap.v1 import fdpass_pb2 as fdpass, tracking_pb2 as pb, tracking_pb2_grpc, types_pb2

DIR = os.environ.get("FDMAP_RUNTIME_DIR", "/run/fdmap")
user, slash, name = sys.argv[1].rpartition("/")
file = types_pb2.FileRef(name=name)
if slash:  # a file of another user
    uid = int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid
    file = types_pb2.FileRef(owned_name=types_pb2.OwnedName(uid=uid, name=name))


def call(session, **request):
    """The reply to a request on the fdpass socket, and its descriptors."""
    session.send(fdpass.FdpassRequest(**request).SerializeToString())
    message, descriptors, _, _ = socket.recv_fds(session, 65536, 1)
    reply = fdpass.FdpassReply.FromString(message)
    if reply.WhichOneof("result") == "error":
        sys.exit(f"incremental_copy.py: {reply.error.message}")
    return reply, descriptors


session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
session.connect(f"{DIR}/fdpass.sock")
page_size = call(session, hello=fdpass.Hello(version=1, client="incremental-copy"))[0].welcome.page_size
_, [source] = call(session, open=fdpass.Open(file=file, mode=fdpass.Open.MODE_READ_ONLY))
target = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT, 0o600)
inode = os.fstat(target)
# The cursor of this target. A later target can have the inode number of a deleted one, but not its time of birth.
born = subprocess.check_output(["stat", "--format=%.9W", sys.argv[2]], text=True).strip().replace(".", "-")
cursor = f"incremental-copy-{inode.st_dev:x}-{inode.st_ino:x}-{born}"
options = [("grpc.default_authority", "localhost")]  # see README.md
with grpc.insecure_channel(f"unix:{DIR}/fdmap.sock", options=options) as channel:
    tracking = tracking_pb2_grpc.TrackingStub(channel)
    exists = cursor in [c.name for c in tracking.ListCursors(pb.ListCursorsRequest(file=file)).cursors]
    # After a crash in one of these steps the target is empty or has no cursor: the next run repeats them.
    if not exists or inode.st_size == 0:
        if exists:
            tracking.DeleteCursor(pb.DeleteCursorRequest(file=file, name=cursor))
        os.ftruncate(target, 0)
        tracking.CreateCursor(pb.CreateCursorRequest(file=file, name=cursor))
    begun = tracking.BeginCursor(pb.BeginCursorRequest(file=file, name=cursor)).cursor
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for message in tracking.Changes(pb.ChangesRequest(file=file, cursor=cursor)):
        at = message.runs.first_page * page_size
        for skip, length in zip(message.runs.skips, message.runs.lengths):
            at, end = at + skip * page_size, at + (skip + length) * page_size
            while at < min(end, size) and (data := os.pread(source, min(end - at, size - at, 1 << 20), at)):
                at += os.pwrite(target, data, at)
            at = end
    os.fsync(target)
    tracking.CommitCursor(pb.CommitCursorRequest(file=file, name=cursor, generation=begun.until_generation))
