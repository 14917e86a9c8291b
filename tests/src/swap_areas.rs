//! The swap areas of the host.

use std::path::PathBuf;

use crate::HarnessResult;
use crate::host_io::read;

/// A swap area of the host.
#[derive(Clone, Debug)]
pub struct AreaInfo {
    /// The device or file.
    pub path: PathBuf,
    pub bytes: u64,
    pub free_bytes: u64,
    /// The kernel fills areas of higher priority first, and areas of equal priority in turn.
    pub priority: i32,
}

/// The swap areas of the host.
///
/// # Errors
/// [`HarnessError::File`]
pub fn areas() -> HarnessResult<Vec<AreaInfo>> {
    Ok(read("/proc/swaps")?.lines().skip(1).filter_map(parse_area).collect())
}

fn parse_area(line: &str) -> Option<AreaInfo> {
    let mut fields = line.split_whitespace();
    let path = PathBuf::from(fields.next()?);
    let _kind = fields.next()?;
    let kib: u64 = fields.next()?.parse().ok()?;
    let used: u64 = fields.next()?.parse().ok()?;
    let priority = fields.next()?.parse().ok()?;
    Some(AreaInfo { path, bytes: kib * 1024, free_bytes: kib.saturating_sub(used) * 1024, priority })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn areas_are_parsed() {
        let area = parse_area("/dev/zram1   partition\t1024\t\t100\t\t100").unwrap();
        assert_eq!(area.path, Path::new("/dev/zram1"));
        assert_eq!((area.bytes, area.free_bytes, area.priority), (1 << 20, 924 << 10, 100));
        assert!(parse_area("garbage").is_none());
    }
}
