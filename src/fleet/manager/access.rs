//! Whether a user is a member of a group, from the contents of `/etc/passwd` and `/etc/group`, for
//! buses that do not report the groups of a sender. Pure.

/// Returns the id of a group.
pub fn group_id(groups: &str, name: &str) -> Option<u32> {
    let mut fields = groups.lines().map(|line| line.split(':'));
    fields.find_map(|mut of| (of.next()? == name).then(|| of.nth(1)?.parse().ok())?)
}

/// Returns whether the group is the user's own, or lists the user.
pub fn is_member(users: &str, groups: &str, user: u32, group: &str) -> bool {
    let Some(gid) = group_id(groups, group) else { return false };
    let account = users.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let is_user = fields.get(2)?.parse() == Ok(user);
        is_user.then(|| Some((*fields.first()?, fields.get(3)?.parse::<u32>().ok()?)))?
    });
    let Some((name, own)) = account else { return false };
    let listed = groups.lines().filter(|line| line.split(':').next() == Some(group));
    own == gid
        || listed.flat_map(|line| line.split(':').nth(3)).any(|names| names.split(',').any(|n| n == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/:/bin/sh\nben:x:1001:200::/:/bin/sh\n";
    const GROUPS: &str = "root:x:0:\nfleet:x:200:ann,carl\nother:x:201:ben\nbroken\n";

    #[test]
    fn members_are_found_in_both_files() {
        for (user, group, member) in [
            (1000, "fleet", true),
            (1001, "fleet", true),
            (1001, "other", true),
            (1000, "other", false),
            (0, "fleet", false),
            (1002, "fleet", false),
            (1000, "missing", false),
            (1000, "", false),
        ] {
            assert_eq!(is_member(USERS, GROUPS, user, group), member, "{user} {group}");
        }
        assert_eq!(group_id(GROUPS, "fleet"), Some(200));
        assert_eq!(group_id(GROUPS, "broken"), None);
    }
}
