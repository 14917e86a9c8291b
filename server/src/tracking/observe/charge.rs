//! What a user is charged for.

use std::fmt::Debug;
use std::sync::Arc;

/// What a user is charged for an address space, until it is dropped. Of a Track request also until its userfaultfd is closed.
pub type Charge = Arc<dyn Debug + Send + Sync>;
