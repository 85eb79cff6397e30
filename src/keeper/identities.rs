//! The identities that each connection has proved, with limits on their number and their bytes, for one
//! connection and for all. Pure.

use std::net::IpAddr;
use std::sync::Arc;

use super::acl::Identity;

/// Limits on what clients may have the server remember about their identities.
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
    /// The agent of a machine proves one identity for each service and each charm of its units, on one
    /// connection.
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
    /// Shared, so that a request holds its caller's identities while it changes the service.
    list: Arc<Vec<Identity>>,
    bytes: usize,
}

/// By the connection's number.
#[derive(Debug, Default)]
pub struct Identities {
    of: Vec<Proved>,
    count: usize,
    bytes: usize,
}

impl Identities {
    /// A new connection from `addr`: that is the identity it has without proof. It is not counted.
    pub fn open(&mut self, id: usize, addr: IpAddr) {
        self.close(id);
        if self.of.len() <= id {
            self.of.resize_with(id + 1, Proved::default);
        }
        self.of[id].list = Arc::new(vec![Identity::ip(addr)]);
    }

    pub fn close(&mut self, id: usize) {
        let Some(proved) = self.of.get_mut(id).map(std::mem::take) else { return };
        self.count -= proved.list.len().saturating_sub(1);
        self.bytes -= proved.bytes;
    }

    pub fn get(&self, id: usize) -> Arc<Vec<Identity>> {
        self.of.get(id).map(|proved| proved.list.clone()).unwrap_or_default()
    }

    pub fn of(&self, id: usize) -> &[Identity] {
        self.of.get(id).map_or(&[], |proved| &proved.list)
    }

    /// Identities and their bytes, of all connections.
    pub fn usage(&self) -> (usize, usize) {
        (self.count, self.bytes)
    }

    /// Adds the new identities among `more` to the connection, all of them or none.
    pub fn add(&mut self, id: usize, more: Vec<Identity>, limits: &IdentityLimits) -> Result<(), TooMany> {
        let Some(proved) = self.of.get_mut(id) else { return Ok(()) };
        let more: Vec<Identity> = more.into_iter().filter(|who| !proved.list.contains(who)).collect();
        let bytes: usize = more.iter().map(|who| who.scheme.len() + who.id.len()).sum();
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
        Arc::make_mut(&mut proved.list).extend(more);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(user: &str) -> Vec<Identity> {
        vec![Identity::new("digest", user)]
    }

    #[test]
    fn each_limit_refuses_what_exceeds_it_and_nothing_else() {
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
            assert_eq!(identities.add(0, who("ab"), &limits), first, "{limits:?}");
            assert_eq!(identities.add(0, who("ab"), &limits), Ok(()), "proved already: {limits:?}");
            assert_eq!(identities.add(0, who("cd"), &limits), second, "{limits:?}");
            assert_eq!(identities.add(1, who("ef"), &limits), of_another, "{limits:?}");
        }
    }

    #[test]
    fn a_closed_connection_frees_what_it_took() {
        let mut identities = Identities::default();
        identities.open(3, [127, 0, 0, 1].into());
        identities.add(3, who("ab"), &IdentityLimits::default()).unwrap();
        assert_eq!(identities.usage(), (1, 8));
        identities.close(3);
        assert_eq!((identities.usage(), identities.of(3)), ((0, 0), &[][..]));
    }
}
