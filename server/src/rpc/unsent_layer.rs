//! The layer that bounds the answers of all services: [`unsent`].

use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use super::peer::PeerInfo;
use super::unsent;

/// Bounds the answers of a service.
#[derive(Clone, Copy, Debug)]
pub(super) struct BoundUnsent;

#[derive(Clone, Debug)]
pub(super) struct BoundedService<S>(S);

impl<S> Layer<S> for BoundUnsent {
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
        let connection = request.extensions().get::<PeerInfo>().map(PeerInfo::unsent);
        let answer = self.0.call(request);
        Box::pin(async move {
            // Each connection has a peer.
            let Some(connection) = connection else { return answer.await };
            Ok(answer.await?.map(|body| unsent::bounded(connection, body)))
        })
    }
}
