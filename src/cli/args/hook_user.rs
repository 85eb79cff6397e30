//! The user that runs hooks, from `--hook-user` or its default, and whether that user can reach a
//! directory. This file changes nothing on the host.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::unit::host::HookUser;

/// First UID for units, in a range that systemd leaves unassigned.
const FIRST: u32 = 1_879_048_192;

/// The default of `--hook-user` for root.
pub(in crate::cli) const USUAL: &str = "1879048192+";

/// Minimum number of mapped UIDs for separate users.
const ENOUGH: u64 = 65_536;

/// Largest first UID; leaves room for all units.
const MAX_FIRST: u32 = 4_000_000_000;

/// Rights of this process to change users.
#[derive(Debug)]
pub(in crate::cli) struct Powers<'a> {
    pub(in crate::cli) is_root: bool,
    /// `/proc/self/uid_map` and `gid_map`: in a container, not every UID is mapped.
    pub(in crate::cli) maps: [&'a str; 2],
}

/// Returns the default: a separate user for each unit where that is possible, so that no unit can
/// access the files of another. Otherwise also returns the reason.
pub(in crate::cli) fn usual(powers: &Powers<'_>) -> (HookUser, Option<&'static str>) {
    if !powers.is_root {
        return (HookUser::Agents, Some("only root can give each unit a separate user"));
    }
    if !powers.maps.iter().all(|map| is_mapped(map)) {
        return (
            HookUser::Agents,
            Some("the user namespace has too few users to give each unit a separate one"),
        );
    }
    (HookUser::Each(FIRST), None)
}

/// Whether a uid_map, with lines of inside id, outside id and count, covers the UIDs of units.
fn is_mapped(map: &str) -> bool {
    let first = u64::from(FIRST);
    map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        matches!(numbers[..], [within, _, count] if within <= first && within + count >= first + ENOUGH)
    })
}

pub(in crate::cli) fn parse(typed: &str, passwd: &str) -> Result<HookUser, String> {
    if let Some(Ok(first)) = typed.strip_suffix('+').map(str::parse::<u32>)
        && (1..=MAX_FIRST).contains(&first)
    {
        return Ok(HookUser::Each(first));
    }
    let numbers = typed.split_once(':').map(|(user, group)| (user.parse(), group.parse()));
    if let Some((Ok(user), Ok(group))) = numbers {
        return Ok(HookUser::One(user, group));
    }
    let entry =
        passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|entry| entry[0] == typed);
    let found =
        entry.and_then(|entry| Some(HookUser::One(entry.get(2)?.parse().ok()?, entry.get(3)?.parse().ok()?)));
    found.ok_or_else(|| {
        format!("no user '{}' on this machine; UID:GID and UID+ are also accepted", typed.escape_debug())
    })
}

/// Whether hooks run as another user than this process.
pub(in crate::cli) fn is_another(user: HookUser, own: u32) -> bool {
    match user {
        HookUser::Agents => false,
        HookUser::One(user, _) => user != own,
        HookUser::Each(_) => true,
    }
}

/// Returns the first directory above `place`, from the root, that the user cannot search. Missing
/// directories are ignored.
pub(in crate::cli) fn closed_to(user: HookUser, place: &Path) -> Option<PathBuf> {
    let there = place.ancestors().find_map(|above| fs::canonicalize(above).ok())?;
    let mut way: Vec<&Path> = there.ancestors().collect();
    way.reverse();
    let shut = way.into_iter().find(|directory| {
        fs::metadata(directory).is_ok_and(|found| !passes(user, found.mode(), found.uid(), found.gid()))
    });
    shut.map(Path::to_owned)
}

fn passes(user: HookUser, mode: u32, owner: u32, group: u32) -> bool {
    match user {
        HookUser::Agents | HookUser::One(0, _) => true,
        HookUser::One(own, _) if own == owner => mode & 0o100 != 0,
        HookUser::One(_, own) if own == group => mode & 0o010 != 0,
        HookUser::One(..) | HookUser::Each(_) => mode & 0o001 != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn hook_users_are_names_or_numbers() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nweb:x:33:44::/var/www:/bin/false\nodd:x:a:b\n\n";
        assert_eq!(parse("web", passwd), Ok(HookUser::One(33, 44)));
        assert_eq!(parse("1000:1001", passwd), Ok(HookUser::One(1000, 1001)));
        assert_eq!(parse("100000+", passwd), Ok(HookUser::Each(100_000)));
        assert_eq!(parse(USUAL, passwd), Ok(HookUser::Each(FIRST)));
        for unknown in ["nobody", "odd", "33", "33:x", "", "-1:5", "+", "0+", "4294967295+"] {
            let refused = parse(unknown, passwd).expect_err(unknown);
            assert!(refused.starts_with("no user '"), "{refused}");
        }
    }

    #[test]
    fn units_get_separate_users_where_possible() {
        let all = "         0          0 4294967295\n";
        let rootless = "0 1000 1\n1 100000 65536\n";
        for (is_root, uids, gids, apart) in [
            (true, all, all, true),
            (true, "0 0 1000\n1000 1000 4294966295\n", all, true),
            (true, rootless, rootless, false),
            (true, all, rootless, false),
            (true, "", "nonsense", false),
            (false, all, all, false),
        ] {
            let (user, shared) = usual(&Powers { is_root, maps: [uids, gids] });
            let wanted = if apart { HookUser::Each(FIRST) } else { HookUser::Agents };
            assert_eq!((user, shared.is_none()), (wanted, apart), "{is_root} {uids} {gids}");
        }
    }

    #[test]
    fn directories_without_search_permission_are_found() {
        let (each, web) = (HookUser::Each(FIRST), HookUser::One(33, 44));
        for (user, mode, owner, group, open) in [
            (each, 0o711, 0, 0, true),
            (each, 0o710, 0, 0, false),
            (web, 0o700, 33, 0, true),
            (web, 0o701, 0, 44, false),
            (web, 0o710, 0, 44, true),
            (HookUser::One(0, 0), 0o700, 5, 5, true),
            (HookUser::Agents, 0o700, 0, 0, true),
        ] {
            assert_eq!(passes(user, 0o40000 | mode, owner, group), open, "{user:?} {mode:o}");
        }
        let home = tempfile::tempdir().unwrap();
        let shut = home.path().join("shut");
        fs::create_dir_all(shut.join("open")).unwrap();
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        mode(home.path(), 0o755);
        mode(&shut, 0o700);
        assert_eq!(closed_to(each, &shut.join("open/not/there")), Some(fs::canonicalize(&shut).unwrap()));
        mode(&shut, 0o711);
        assert_eq!(closed_to(each, &shut.join("open/not/there")), None);
    }
}
