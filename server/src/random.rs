//! Random ids, unique across restarts of the service.

/// Draws 64 random bits until `accept` makes an id of them.
pub fn random_id<T>(accept: impl Fn(u64) -> Option<T>) -> T {
    loop {
        let mut bytes = [0; 8];
        // Fails only without both getrandom(2) and /dev/urandom.
        if let Err(error) = getrandom::fill(&mut bytes) {
            unreachable!("no source of random bytes: {error}");
        }
        if let Some(id) = accept(u64::from_le_bytes(bytes)) {
            return id;
        }
    }
}
