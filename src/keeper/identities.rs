//! The authenticated identities of each connection, with limits on their number and size, for one
//! connection and for all. Pure.

use std::net::IpAddr;
use std::sync::Arc;

use super::acl::{Identity, IdentitySet};

/// Limits on the identities that the server stores for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdentityLimits {
    /// Bytes of one authentication request: `user:password`.
    pub max_auth_bytes: usize,
    pub per_connection: usize,
    pub bytes_per_connection: usize,
    pub total: usize,
    pub total_bytes: usize,
}

impl Default for IdentityLimits {
    /// The defaults fit a machine agent, which authenticates one identity for each service and each
    /// charm of its units, on one connection.
    fn default() -> Self {
        IdentityLimits {
            max_auth_bytes: 4 << 10,
            per_connection: 4_096,
            bytes_per_connection: 512 << 10,
            total: 200_000,
            total_bytes: 32 << 20,
        }
    }
}

/// An authentication that would exceed a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooMany;

#[derive(Debug, Default)]
struct Proved {
    /// Shared, so that a request can hold its caller's identities while it modifies the service.
    list: Arc<IdentitySet>,
    bytes: usize,
}

/// The identities of all connections, indexed by connection id.
#[derive(Debug, Default)]
pub struct Identities {
    of: Vec<Proved>,
    count: usize,
    bytes: usize,
}

impl Identities {
    /// Registers a new connection. Its address is an identity that needs no authentication and is
    /// not counted.
    pub fn open(&mut self, id: usize, addr: IpAddr) {
        self.close(id);
        if self.of.len() <= id {
            self.of.resize_with(id + 1, Proved::default);
        }
        self.of[id].list = Arc::new([Identity::ip(addr)].into_iter().collect());
    }

    pub fn close(&mut self, id: usize) {
        let Some(proved) = self.of.get_mut(id).map(std::mem::take) else { return };
        self.count -= proved.list.len().saturating_sub(1);
        self.bytes -= proved.bytes;
    }

    pub fn get(&self, id: usize) -> Arc<IdentitySet> {
        self.of.get(id).map(|proved| proved.list.clone()).unwrap_or_default()
    }

    pub fn of(&self, id: usize) -> &IdentitySet {
        const NONE: &IdentitySet = &IdentitySet::NONE;
        self.of.get(id).map_or(NONE, |proved| &proved.list)
    }

    /// Returns the number of identities of all connections, and their bytes.
    pub fn usage(&self) -> (usize, usize) {
        (self.count, self.bytes)
    }

    /// Adds the new identities among `more` to the connection, all of them or none.
    pub fn add(&mut self, id: usize, more: Vec<Identity>, limits: &IdentityLimits) -> Result<(), TooMany> {
        let Some(proved) = self.of.get_mut(id) else { return Ok(()) };
        let more: Vec<Identity> =
            more.into_iter().filter(|identity| !proved.list.contains(identity)).collect();
        let bytes: usize = more.iter().map(|identity| identity.scheme.len() + identity.id.len()).sum();
        let fits = proved.list.len() - 1 + more.len() <= limits.per_connection
            && proved.bytes + bytes <= limits.bytes_per_connection
            && self.count + more.len() <= limits.total
            && self.bytes + bytes <= limits.total_bytes;
        if !fits {
            return Err(TooMany);
        }
        self.count += more.len();
        self.bytes += bytes;
        proved.bytes += bytes;
        let list = Arc::make_mut(&mut proved.list);
        more.into_iter().for_each(|identity| list.insert(identity));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(user: &str) -> Vec<Identity> {
        vec![Identity::new("digest", user)]
    }

    #[test]
    fn each_limit_refuses_only_requests_beyond_it() {
        let wide = IdentityLimits::default();
        let cases = [
            (IdentityLimits { per_connection: 1, ..wide }, Ok(()), Err(TooMany), Ok(())),
            (IdentityLimits { bytes_per_connection: 8, ..wide }, Ok(()), Err(TooMany), Ok(())),
            (IdentityLimits { total: 2, ..wide }, Ok(()), Ok(()), Err(TooMany)),
            (IdentityLimits { total_bytes: 16, ..wide }, Ok(()), Ok(()), Err(TooMany)),
            (wide, Ok(()), Ok(()), Ok(())),
        ];
        for (limits, first, second, of_another) in cases {
            let mut identities = Identities::default();
            (0..2).for_each(|id| identities.open(id, [127, 0, 0, 1].into()));
            assert_eq!(identities.add(0, identity("ab"), &limits), first, "{limits:?}");
            assert_eq!(
                identities.add(0, identity("ab"), &limits),
                Ok(()),
                "authenticated already: {limits:?}"
            );
            assert_eq!(identities.add(0, identity("cd"), &limits), second, "{limits:?}");
            assert_eq!(identities.add(1, identity("ef"), &limits), of_another, "{limits:?}");
        }
    }

    #[test]
    fn closed_connection_releases_its_identities() {
        let mut identities = Identities::default();
        identities.open(3, [127, 0, 0, 1].into());
        identities.add(3, identity("ab"), &IdentityLimits::default()).unwrap();
        assert_eq!(identities.usage(), (1, 8));
        identities.close(3);
        assert_eq!((identities.usage(), identities.of(3)), ((0, 0), &IdentitySet::NONE));
    }
}
