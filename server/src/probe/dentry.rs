//! What refers to the dentry of a file, and whether a process uses the file. Data only.

/// The references to the dentry of a file at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DentryReferences {
    /// One for each open file description, and one for the name of a named dentry.
    pub references: i32,
    /// Those of the service: open file descriptions that exist as long as the service has the file.
    pub own: u32,
    /// Names of the inode.
    pub links: u32,
    /// The dentry is one of these names.
    pub named: bool,
    /// The inode has no other dentry.
    pub only_dentry: bool,
    /// The names did not change while the references were counted.
    pub settled: bool,
}

impl DentryReferences {
    /// False if certainly no open file description of the file exists but those of the service. The name of a file in a mounted file
    /// system is no user. A System V segment that was not removed has one.
    #[must_use]
    pub fn is_used(&self) -> bool {
        let names = match (self.named, self.links) {
            (false, 0) => 0,
            (true, 1) => 1,
            // Other names have dentries of their own, which other processes may have open.
            _ => return true,
        };
        // Descriptions that were opened by a name that is gone keep its dentry.
        let is_known = self.settled && self.only_dentry;
        !is_known || i64::from(self.references) != i64::from(self.own) + names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMFD: DentryReferences =
        DentryReferences { references: 2, own: 2, links: 0, named: false, only_dentry: true, settled: true };
    const NAMED: DentryReferences = DentryReferences { references: 3, links: 1, named: true, ..MEMFD };

    #[test]
    fn only_the_references_of_the_service_leave_a_file_unused() {
        for (references, used) in [
            (MEMFD, false),
            (DentryReferences { references: 3, ..MEMFD }, true),
            (DentryReferences { references: 1, ..MEMFD }, true),
            (DentryReferences { references: i32::MIN, ..MEMFD }, true),
            (DentryReferences { references: 1, own: 1, ..MEMFD }, false),
            (DentryReferences { only_dentry: false, ..MEMFD }, true),
            (DentryReferences { settled: false, ..MEMFD }, true),
            (NAMED, false),
            (DentryReferences { references: 4, ..NAMED }, true),
            (DentryReferences { references: 2, ..NAMED }, true),
            (DentryReferences { links: 2, ..NAMED }, true),
            (DentryReferences { links: 0, ..NAMED }, true),
            (DentryReferences { named: false, ..NAMED }, true),
            (DentryReferences { only_dentry: false, ..NAMED }, true),
        ] {
            assert_eq!(references.is_used(), used, "{references:?}");
        }
    }
}
