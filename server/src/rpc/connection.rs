//! A connection to the unix socket of gRPC.

use std::io;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use fdmap_sys::unix_stream::{Received, read};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

use crate::fdpass::{Connection, Kept};

/// A connection to the unix socket. Where the kernel passes descriptors on any such socket, a read fails when some have arrived.
#[derive(Debug)]
pub struct UnixConnection {
    connection: Connection,
    /// Dropped last.
    _kept: Option<Kept>,
}

impl UnixConnection {
    pub(super) const fn new(connection: Connection, kept: Option<Kept>) -> Self {
        Self { connection, _kept: kept }
    }
}

impl AsyncRead for UnixConnection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let connection = &mut self.get_mut().connection;
        if !connection.passes_descriptors() {
            return Pin::new(connection.socket_mut()).poll_read(cx, buf);
        }
        let socket = connection.socket();
        loop {
            ready!(socket.poll_read_ready(cx))?;
            let unfilled = buf.initialize_unfilled();
            let received =
                socket.try_io(Interest::READABLE, || read(socket.as_fd(), unfilled).map_err(io::Error::from));
            return match received {
                Ok(Received::Bytes(len)) => {
                    buf.advance(len);
                    Poll::Ready(Ok(()))
                }
                Ok(Received::Descriptors) => {
                    let message = "the client sent descriptors on the gRPC socket";
                    Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, message)))
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => Poll::Ready(Err(error)),
            };
        }
    }
}

impl AsyncWrite for UnixConnection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(self.get_mut().connection.socket_mut()).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.get_mut().connection.socket_mut()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.get_mut().connection.socket_mut()).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(self.get_mut().connection.socket_mut()).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.socket().is_write_vectored()
    }
}
