//! Service and kernel information.

use fdmap_proto::{HostInfo, v1};

use super::Client;
use crate::ClientError;

impl Client {
    /// Returns version, probe, kernel capabilities and limits of the service.
    ///
    /// # Errors
    /// [`ClientError`] of the connection.
    pub async fn host_info(&self) -> Result<HostInfo, ClientError> {
        let info = self.wait("Info", self.host.clone().info(v1::InfoRequest {})).await?;
        Ok(info.try_into()?)
    }
}
