//! The layer that bounds requests and answers of all services: [`unreceived`], [`unsent`].

use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use super::peer::PeerInfo;
use super::stream::Streamed;
use super::unsent::AnswerKind;
use super::{unreceived, unsent};
use crate::status::status;

/// Reflection is a stream of requests, which a client leaves open. It has a limit of its own.
const REFLECTION: &str = "/grpc.reflection.";

/// Bounds requests and answers of a service.
#[derive(Clone, Copy, Debug)]
pub(super) struct BoundBodies;

#[derive(Clone, Debug)]
pub(super) struct BoundedService<S>(S);

impl<S> Layer<S> for BoundBodies {
    type Service = BoundedService<S>;

    fn layer(&self, inner: S) -> BoundedService<S> {
        BoundedService(inner)
    }
}

impl<S> Service<Request<Body>> for BoundedService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // Each connection has a peer.
        let bounds = request.extensions().get::<PeerInfo>().map(|peer| (peer.unreceived(), peer.unsent()));
        let Some((unreceived, unsent)) = bounds else {
            return Box::pin(self.0.call(request));
        };
        let is_one_message = !request.uri().path().starts_with(REFLECTION);
        let reserved = match unsent.reserve() {
            Ok(reserved) => reserved,
            Err(error) => return Box::pin(async move { Ok(status(error).into_http()) }),
        };
        let answer = self.0.call(if is_one_message {
            request.map(|body| unreceived::bounded(unreceived, body))
        } else {
            request
        });
        Box::pin(async move {
            let answer = answer.await?;
            let is_stream = answer.extensions().get::<Streamed>().is_some();
            let kind = if is_stream { AnswerKind::Stream } else { AnswerKind::Single(reserved) };
            Ok(answer.map(|body| unsent::bounded(unsent, kind, body)))
        })
    }
}
