//! Calls of which a client does not read the answer.

use std::io;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// The largest window of HTTP/2.
pub const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// The window of a call in which the service can send nothing but headers.
pub const NO_WINDOW: u32 = 0;
/// Time between the headers of an answer and the status of a call that is refused afterwards.
const MAX_REFUSAL: Duration = Duration::from_secs(1);

/// A channel over one connection. `windows`: of each call, and of the connection.
///
/// # Panics
/// If the service refuses the connection.
pub async fn channel<S>(socket: S, windows: [u32; 2]) -> Channel
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut socket = Some(socket);
    let connector = tower::service_fn(move |_: Uri| {
        // A channel whose connection ends would connect again.
        let socket = socket.take().ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionReset));
        std::future::ready(socket.map(TokioIo::new))
    });
    let [of_call, of_connection] = windows;
    Endpoint::from_static("http://fdmapd.invalid")
        .initial_stream_window_size(of_call)
        .initial_connection_window_size(of_connection)
        .connect_with_connector(connector)
        .await
        .expect("a connection")
}

/// Makes a call over a channel whose calls have [`NO_WINDOW`]. The service has its answer, until the result is dropped.
///
/// # Errors
/// The status of a call that is refused.
///
/// # Panics
/// If the service sends the answer.
pub async fn call<Q, A>(channel: &Channel, path: &'static str, request: Q) -> Result<Streaming<A>, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.expect("a connection");
    let codec = ProstCodec::<Q, A>::default();
    let request = Request::new(request);
    let mut answer =
        client.server_streaming(request, PathAndQuery::from_static(path), codec).await?.into_inner();
    match tokio::time::timeout(MAX_REFUSAL, answer.message()).await {
        Ok(Err(refused)) => Err(refused),
        Ok(Ok(_)) => panic!("an answer of {path} arrived without a window"),
        Err(_) => Ok(answer),
    }
}
