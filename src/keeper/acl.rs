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

/// `scheme:id`, either authenticated by a connection or named in an access list.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
/// duplicates are dropped. Entries that no identity can match are refused.
pub fn resolve(wanted: &[Acl], proved: &[Identity]) -> Result<Vec<Acl>, Code> {
    let mut list: Vec<Acl> = Vec::with_capacity(wanted.len());
    // A client can send a list of tens of thousands of entries: each must take constant time.
    let (mut seen, mut expanded) = (HashSet::with_capacity(wanted.len()), HashSet::new());
    let mut push = |acl: Acl| {
        if !seen.contains(&acl) {
            seen.insert(acl.clone());
            list.push(acl);
        }
    };
    for acl in wanted {
        match &*acl.identity.scheme {
            "world" if &*acl.identity.id == "anyone" => push(acl.clone()),
            "auth" if expanded.contains(&acl.perms) => {}
            "auth" => {
                let mut digests = proved.iter().filter(|identity| &*identity.scheme == "digest").peekable();
                if digests.peek().is_none() {
                    return Err(Code::InvalidAcl);
                }
                digests.for_each(|identity| push(Acl { perms: acl.perms, identity: identity.clone() }));
                expanded.insert(acl.perms);
            }
            "digest" if acl.identity.id.split(':').count() == 2 => push(acl.clone()),
            "ip" if parse_network(&acl.identity.id).is_some() => push(acl.clone()),
            _ => return Err(Code::InvalidAcl),
        }
    }
    if list.is_empty() { Err(Code::InvalidAcl) } else { Ok(list) }
}

/// Returns whether one of the identities `proved` has any of the rights in `perm`.
pub fn allows(list: &[Acl], perm: i32, proved: &[Identity]) -> bool {
    list.iter().filter(|acl| acl.perms & perm != 0).any(|acl| match &*acl.identity.scheme {
        "world" => &*acl.identity.id == "anyone",
        "ip" => proved
            .iter()
            .any(|identity| &*identity.scheme == "ip" && in_network(&acl.identity.id, &identity.id)),
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

pub fn is_super(proved: &[Identity]) -> bool {
    proved.iter().any(|identity| &*identity.scheme == "super")
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

    #[test]
    fn digests_match_zookeeper() {
        // From ZooKeeper's own tool: DigestAuthenticationProvider super:test.
        assert_eq!(digest("super:test"), "super:D/InIHSb7yEEbrWz8b9l71RjZJU=");
    }

    #[test]
    fn auth_is_replaced_by_the_callers_identities() {
        let me = Identity::new("digest", "me:x");
        let resolved = resolve(&[acl(ALL, "auth", "")], &[Identity::new("ip", "127.0.0.1"), me.clone()]);
        assert_eq!(resolved, Ok(vec![Acl { perms: ALL, identity: me }]));
        assert_eq!(resolve(&[acl(ALL, "auth", "")], &[]), Err(Code::InvalidAcl));
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
            assert_eq!(resolve(&[acl(ALL, scheme, id)], &[]), Err(Code::InvalidAcl), "{scheme}:{id}");
        }
        assert_eq!(resolve(&[], &[]), Err(Code::InvalidAcl));
    }

    #[test]
    fn duplicate_entries_are_dropped() {
        let one = acl(READ, "world", "anyone");
        assert_eq!(resolve(&[one.clone(), one.clone()], &[]), Ok(vec![one]));
    }

    /// With quadratic work this would take minutes.
    #[test]
    fn long_lists_are_resolved_in_order() {
        let user = |n: usize| acl(READ, "digest", &format!("u{n}:x"));
        let mut wanted: Vec<Acl> = (0..100_000).map(user).collect();
        let expected = wanted.clone();
        wanted.extend((0..100_000).map(user));
        assert_eq!(resolve(&wanted, &[]), Ok(expected));
        let proved: Vec<Identity> = (0..4_000).map(|n| user(n).identity).collect();
        let auth = vec![acl(READ, "auth", ""); 50_000];
        assert_eq!(resolve(&auth, &proved), Ok((0..4_000).map(user).collect()));
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
            assert_eq!(allows(&list, READ, &[Identity::new("ip", addr)]), expected, "{addr} in {network}");
        }
    }

    #[test]
    fn only_listed_rights_are_granted_and_super_has_all() {
        let list = [acl(READ | WRITE, "digest", "me:x")];
        let me = [Identity::new("digest", "me:x")];
        assert!(allows(&list, WRITE, &me));
        assert!(!allows(&list, ADMIN, &me));
        assert!(!allows(&list, READ, &[Identity::new("digest", "you:x")]));
        assert!(allows(&list, ADMIN, &[Identity::new("super", "")]));
    }

    #[test]
    fn unknown_schemes_do_not_authenticate() {
        let peer = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(authenticate("kerberos", b"x", peer, None), Err(Code::AuthFailed));
        assert!(is_super(
            &authenticate("digest", b"super:test", peer, Some("super:D/InIHSb7yEEbrWz8b9l71RjZJU=")).unwrap()
        ));
        assert!(!is_super(
            &authenticate("digest", b"super:tset", peer, Some("super:D/InIHSb7yEEbrWz8b9l71RjZJU=")).unwrap()
        ));
    }
}
