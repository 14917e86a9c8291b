//! TEMP
/// T
#[derive(Debug)]
pub struct Following;
/// T
pub fn companion() {}
