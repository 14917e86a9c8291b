//! Ids that nobody can mistake for another one's, in this run of the service or any other.

/// An id drawn at random.
pub fn random_id<T>(make: impl Fn(u64) -> Option<T>) -> T {
    loop {
        let mut bytes = [0; 8];
        // It fails only on kernels without getrandom(2) and without /dev/urandom.
        if let Err(error) = getrandom::fill(&mut bytes) {
            unreachable!("no randomness: {error}");
        }
        if let Some(id) = make(u64::from_le_bytes(bytes)) {
            return id;
        }
    }
}
