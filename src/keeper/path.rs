//! Validation of znode paths, and their paths_are_split_into_parent_and_name. Pure.

use super::proto::Code;

/// The nodes of every new ZooKeeper tree; they cannot be deleted.
pub const ROOT: &str = "/";
pub const ZOOKEEPER: &str = "/zookeeper";
pub const QUOTA: &str = "/zookeeper/quota";
pub const CONFIG: &str = "/zookeeper/config";

pub fn is_reserved(path: &str) -> bool {
    matches!(path, ROOT | ZOOKEEPER | QUOTA | CONFIG)
}

/// Refuses the same paths as ZooKeeper: relative paths, empty, `.` and `..` elements, and control
/// and private-use characters.
pub fn validate(path: &str) -> Result<(), Code> {
    let Some(rest) = path.strip_prefix('/') else {
        return Err(Code::BadArguments);
    };
    if rest.is_empty() {
        return Ok(());
    }
    let fine =
        rest.split('/').all(|name| !matches!(name, "" | "." | "..")) && !rest.chars().any(is_forbidden);
    if fine { Ok(()) } else { Err(Code::BadArguments) }
}

fn is_forbidden(c: char) -> bool {
    matches!(c, '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..='\u{ffff}')
}

/// Returns the parent path and the own name; `None` for `/`.
pub fn split(path: &str) -> Option<(&str, &str)> {
    let (parent, name) = path.rsplit_once('/')?;
    if name.is_empty() {
        return None;
    }
    Some((if parent.is_empty() { ROOT } else { parent }, name))
}

/// Iterates over the path itself and all its ancestors, up to the root.
pub fn ancestry(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(path), |path| split(path).map(|(parent, _)| parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_validated_as_in_zookeeper() {
        let bad = [
            "",
            "a",
            "a/b",
            "/a/",
            "//a",
            "/a//b",
            "/.",
            "/a/..",
            "/a/./b",
            "/a\0",
            "/a\u{7f}",
            "/\u{e000}",
            "/a\n",
        ];
        for path in bad {
            assert_eq!(validate(path), Err(Code::BadArguments), "{path:?}");
        }
        for path in ["/", "/a", "/a/b.c", "/...", "/é", "/a b", "/𝒳"] {
            assert_eq!(validate(path), Ok(()), "{path:?}");
        }
    }

    #[test]
    fn paths_are_split_into_parent_and_name() {
        assert_eq!(split("/"), None);
        assert_eq!(split("/a"), Some(("/", "a")));
        assert_eq!(split("/a/b"), Some(("/a", "b")));
        assert_eq!(ancestry("/a/b").collect::<Vec<_>>(), ["/a/b", "/a", "/"]);
    }
}
