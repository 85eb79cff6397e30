//! Access control of znodes: identities, access lists, and the schemes world, auth, digest, ip and
//! super. Pure. Addresses and passwords are arguments.

use std::collections::HashSet;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use sha1::{Digest as _, Sha1};

use super::proto::Code;

pub const READ: i32 = 1;
pub const WRITE: i32 = 2;
pub const CREATE: i32 = 4;
pub const DELETE: i32 = 8;
pub const ADMIN: i32 = 16;
pub const ALL: i32 = 31;

/// Limit of the entries of one access list. A request checks its rights against each entry of the
/// lists of its nodes.
pub const MAX_ENTRIES: usize = 256;

/// `scheme:id`, either authenticated by a connection or named in an access list.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    pub scheme: Box<str>,
    pub id: Box<str>,
}

impl Identity {
    pub fn new(scheme: &str, id: &str) -> Self {
        Identity { scheme: scheme.into(), id: id.into() }
    }

    pub fn ip(addr: IpAddr) -> Self {
        Identity::new("ip", &addr.to_canonical().to_string())
    }

    /// Returns the id without secrets: for a digest identity only the user name.
    pub fn name(&self) -> &str {
        self.id.split(':').next().filter(|_| &*self.scheme == "digest").unwrap_or(&self.id)
    }
}

/// The authenticated identities of a connection. Sorted, so that the time to look one up does not
/// grow with their number: a client chooses both that number and the length of an access list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdentitySet(Vec<Identity>);

impl IdentitySet {
    pub const NONE: IdentitySet = IdentitySet(Vec::new());

    pub fn contains(&self, identity: &Identity) -> bool {
        self.0.binary_search(identity).is_ok()
    }

    pub fn insert(&mut self, identity: Identity) {
        if let Err(at) = self.0.binary_search(&identity) {
            self.0.insert(at, identity);
        }
    }

    /// The identities of one scheme.
    fn of_scheme(&self, scheme: &str) -> &[Identity] {
        let begin = self.0.partition_point(|identity| &*identity.scheme < scheme);
        let end = self.0.partition_point(|identity| &*identity.scheme <= scheme);
        &self.0[begin..end]
    }
}

impl std::ops::Deref for IdentitySet {
    type Target = [Identity];

    fn deref(&self) -> &[Identity] {
        &self.0
    }
}

impl FromIterator<Identity> for IdentitySet {
    fn from_iter<I: IntoIterator<Item = Identity>>(identities: I) -> Self {
        let mut set = IdentitySet::NONE;
        identities.into_iter().for_each(|identity| set.insert(identity));
        set
    }
}

/// Formats identities for the log: the first few, without secrets, and the number of the others.
#[derive(Debug, Clone, Copy)]
pub struct RedactedIdentities<'a>(pub &'a [Identity]);

impl std::fmt::Display for RedactedIdentities<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 4;
        const NAME_CHARS: usize = 64;
        for (at, identity) in self.0.iter().take(SHOWN).enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(
                f,
                "{comma}{}:{}",
                identity.scheme,
                identity.name().chars().take(NAME_CHARS).collect::<String>()
            )?;
        }
        match self.0.len() {
            0 => write!(f, "none"),
            len if len > SHOWN => write!(f, " and {} more", len - SHOWN),
            _ => Ok(()),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Acl {
    pub perms: i32,
    pub identity: Identity,
}

/// Returns `user:base64(sha1(user:password))`, the form of a digest identity in access lists.
pub fn digest(user_and_password: &str) -> String {
    let user = user_and_password.split(':').next().unwrap_or_default();
    format!("{user}:{}", BASE64.encode(Sha1::digest(user_and_password.as_bytes())))
}

/// Returns the identities of a connection that presented `auth` under `scheme`.
pub fn authenticate(
    scheme: &str,
    auth: &[u8],
    peer: IpAddr,
    super_digest: Option<&str>,
) -> Result<Vec<Identity>, Code> {
    match scheme {
        "digest" => {
            let text = std::str::from_utf8(auth).map_err(|_| Code::AuthFailed)?;
            let id = digest(text);
            let mut proved = Vec::with_capacity(2);
            if super_digest == Some(id.as_str()) {
                proved.push(Identity::new("super", ""));
            }
            proved.push(Identity::new("digest", &id));
            Ok(proved)
        }
        "ip" => Ok(vec![Identity::ip(peer)]),
        _ => Err(Code::AuthFailed),
    }
}

/// Returns the access list to store: `auth` is replaced by the caller's digest identities, and
/// duplicates are dropped. Entries that no identity can match, and lists of more than
/// `MAX_ENTRIES`, are refused. Rights that do not exist are stored and have no effect, as in
/// ZooKeeper.
pub fn resolve(wanted: &[Acl], proved: &IdentitySet) -> Result<Vec<Acl>, Code> {
    let mut list: Vec<Acl> = Vec::new();
    // A client can send a list of tens of thousands of entries: each must take constant time.
    let (mut seen, mut expanded) = (HashSet::new(), HashSet::new());
    let mut push = |acl: Acl| {
        if seen.contains(&acl) {
            return Ok(());
        }
        // Also bounds the work for `auth`: a frame has room for 60,000 of these entries, each of
        // which stands for up to 4,096 identities.
        if list.len() == MAX_ENTRIES {
            return Err(Code::InvalidAcl);
        }
        seen.insert(acl.clone());
        list.push(acl);
        Ok(())
    };
    for acl in wanted {
        match &*acl.identity.scheme {
            "world" if &*acl.identity.id == "anyone" => push(acl.clone())?,
            "auth" if expanded.contains(&acl.perms) => {}
            "auth" => {
                let digests = proved.of_scheme("digest");
                if digests.is_empty() {
                    return Err(Code::InvalidAcl);
                }
                for identity in digests {
                    push(Acl { perms: acl.perms, identity: identity.clone() })?;
                }
                expanded.insert(acl.perms);
            }
            "digest" if acl.identity.id.split(':').count() == 2 => push(acl.clone())?,
            "ip" if parse_network(&acl.identity.id).is_some() => push(acl.clone())?,
            _ => return Err(Code::InvalidAcl),
        }
    }
    if list.is_empty() { Err(Code::InvalidAcl) } else { Ok(list) }
}

/// Returns whether one of the identities `proved` has any of the rights in `perm`.
pub fn allows(list: &[Acl], perm: i32, proved: &IdentitySet) -> bool {
    let addresses = proved.of_scheme("ip");
    list.iter().filter(|acl| acl.perms & perm != 0).any(|acl| match &*acl.identity.scheme {
        "world" => &*acl.identity.id == "anyone",
        "ip" => addresses.iter().any(|identity| in_network(&acl.identity.id, &identity.id)),
        _ => proved.contains(&acl.identity),
    }) || is_super(proved)
}

/// Returns the list without password hashes, for clients without the right to change it: a hash
/// could be attacked offline.
pub fn without_hashes(list: &[Acl]) -> Vec<Acl> {
    let blank = |acl: &Acl| match acl.identity.id.split_once(':') {
        Some((user, _)) if &*acl.identity.scheme == "digest" => {
            Acl { perms: acl.perms, identity: Identity::new("digest", &format!("{user}:x")) }
        }
        _ => acl.clone(),
    };
    list.iter().map(blank).collect()
}

pub fn is_super(proved: &IdentitySet) -> bool {
    !proved.of_scheme("super").is_empty()
}

fn parse_network(text: &str) -> Option<(IpAddr, u32)> {
    let (addr, bits) = match text.split_once('/') {
        Some((addr, bits)) => (addr, Some(bits.parse::<u32>().ok()?)),
        None => (text, None),
    };
    let addr: IpAddr = addr.parse().ok()?;
    let width = if addr.is_ipv4() { 32 } else { 128 };
    let bits = bits.unwrap_or(width);
    (bits <= width).then_some((addr, bits))
}

fn in_network(network: &str, addr: &str) -> bool {
    let (Some((net, bits)), Ok(addr)) = (parse_network(network), addr.parse::<IpAddr>()) else {
        return false;
    };
    match (net, addr) {
        (IpAddr::V4(net), IpAddr::V4(addr)) => {
            let shift = 32 - bits;
            net.to_bits().checked_shr(shift) == addr.to_bits().checked_shr(shift)
        }
        (IpAddr::V6(net), IpAddr::V6(addr)) => {
            let shift = 128 - bits;
            net.to_bits().checked_shr(shift) == addr.to_bits().checked_shr(shift)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(perms: i32, scheme: &str, id: &str) -> Acl {
        Acl { perms, identity: Identity::new(scheme, id) }
    }

    fn set(identities: &[(&str, &str)]) -> IdentitySet {
        identities.iter().map(|(scheme, id)| Identity::new(scheme, id)).collect()
    }

    const NONE: &IdentitySet = &IdentitySet::NONE;

    #[test]
    fn digests_match_zookeeper() {
        // From ZooKeeper's own tool: DigestAuthenticationProvider super:test.
        assert_eq!(digest("super:test"), "super:D/InIHSb7yEEbrWz8b9l71RjZJU=");
    }

    #[test]
    fn auth_is_replaced_by_the_callers_identities() {
        let me = Identity::new("digest", "me:x");
        let resolved = resolve(&[acl(ALL, "auth", "")], &set(&[("ip", "127.0.0.1"), ("digest", "me:x")]));
        assert_eq!(resolved, Ok(vec![Acl { perms: ALL, identity: me }]));
        assert_eq!(resolve(&[acl(ALL, "auth", "")], NONE), Err(Code::InvalidAcl));
    }

    #[test]
    fn entries_that_no_identity_can_match_are_refused() {
        let bad = [
            ("world", "me"),
            ("digest", "nocolon"),
            ("ip", "300.1.1.1"),
            ("ip", "10.0.0.0/33"),
            ("x509", "CN=me"),
        ];
        for (scheme, id) in bad {
            assert_eq!(resolve(&[acl(ALL, scheme, id)], NONE), Err(Code::InvalidAcl), "{scheme}:{id}");
        }
        assert_eq!(resolve(&[], NONE), Err(Code::InvalidAcl));
    }

    #[test]
    fn duplicate_entries_are_dropped() {
        let one = acl(READ, "world", "anyone");
        assert_eq!(resolve(&[one.clone(), one.clone()], NONE), Ok(vec![one]));
    }

    #[test]
    fn only_lists_within_the_limit_are_resolved() {
        let users = |count: usize| -> Vec<Acl> {
            (0..count).map(|n| acl(READ, "digest", &format!("u{n}:x"))).collect()
        };
        let most = users(MAX_ENTRIES);
        let repeated = most.iter().cycle().take(100_000).cloned().collect::<Vec<_>>();
        assert_eq!(resolve(&repeated, NONE), Ok(most), "in order, and without the duplicates");
        assert_eq!(resolve(&users(MAX_ENTRIES + 1), NONE), Err(Code::InvalidAcl));
    }

    /// Without a limit this list would have 268 million entries.
    #[test]
    fn auth_is_expanded_only_within_the_limit() {
        let identities = |count: usize| -> IdentitySet {
            (0..count).map(|n| Identity::new("digest", &format!("u{n}:x"))).collect()
        };
        let auth: Vec<Acl> = (1..=65_536).map(|perms| acl(perms, "auth", "")).collect();
        assert_eq!(resolve(&auth, &identities(4_096)), Err(Code::InvalidAcl));
        assert_eq!(resolve(&auth[..2], &identities(MAX_ENTRIES / 2)).unwrap().len(), MAX_ENTRIES);
        let repeated = vec![acl(READ, "auth", ""); 65_536];
        assert_eq!(resolve(&repeated, &identities(MAX_ENTRIES)).unwrap().len(), MAX_ENTRIES);
    }

    #[test]
    fn identity_set_finds_each_of_its_identities() {
        let mut identities = set(&[("super", ""), ("ip", "10.0.0.1"), ("digest", "b:x"), ("digest", "a:x")]);
        identities.insert(Identity::new("digest", "a:x"));
        assert_eq!(identities.len(), 4);
        assert!(identities.iter().all(|identity| identities.contains(identity)));
        assert!(!identities.contains(&Identity::new("digest", "c:x")));
        for (scheme, count) in [("digest", 2), ("ip", 1), ("super", 1), ("world", 0), ("", 0)] {
            assert_eq!(identities.of_scheme(scheme).len(), count, "{scheme}");
        }
    }

    #[test]
    fn networks_match_by_prefix() {
        let cases = [
            ("10.0.0.0/8", "10.9.8.7", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("0.0.0.0/0", "8.8.8.8", true),
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.1", "127.0.0.2", false),
            ("::/0", "::1", true),
            ("fe80::/10", "fe80::1", true),
            ("fe80::/10", "10.0.0.1", false),
        ];
        for (network, addr, expected) in cases {
            let list = [acl(READ, "ip", network)];
            assert_eq!(allows(&list, READ, &set(&[("ip", addr)])), expected, "{addr} in {network}");
        }
    }

    #[test]
    fn only_listed_rights_are_granted_and_super_has_all() {
        let list = [acl(READ | WRITE, "digest", "me:x")];
        let me = set(&[("digest", "me:x")]);
        assert!(allows(&list, WRITE, &me));
        assert!(!allows(&list, ADMIN, &me));
        assert!(!allows(&list, READ, &set(&[("digest", "you:x")])));
        assert!(allows(&list, ADMIN, &set(&[("super", "")])));
    }

    #[test]
    fn unknown_schemes_do_not_authenticate() {
        let peer = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(authenticate("kerberos", b"x", peer, None), Err(Code::AuthFailed));
        for (text, expected) in [("super:test", true), ("super:tset", false)] {
            let boss = Some("super:D/InIHSb7yEEbrWz8b9l71RjZJU=");
            let proved = authenticate("digest", text.as_bytes(), peer, boss).unwrap();
            assert_eq!(is_super(&proved.into_iter().collect()), expected, "{text}");
        }
    }
}
