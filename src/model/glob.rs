//! Shell patterns: `*` any text, `?` any character, `[a-z]` one of a set, `[!a-z]` one outside it.
//! A `[` that is never closed stands for itself, as in a shell. Pure.

/// A pattern with its characters taken apart once, because it is tried on thousands of names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Any,
    One,
    Char(char),
    Set { ranges: Vec<(char, char)>, negated: bool },
}

impl Glob {
    pub fn new(pattern: &str) -> Self {
        let chars: Vec<char> = pattern.chars().collect();
        let mut parts = Vec::new();
        let mut at = 0;
        while let Some(&c) = chars.get(at) {
            let (part, taken) = match c {
                '*' => (Part::Any, 1),
                '?' => (Part::One, 1),
                '[' => set(&chars[at + 1..]).map_or((Part::Char('['), 1), |(part, taken)| (part, taken + 1)),
                c => (Part::Char(c), 1),
            };
            parts.push(part);
            at += taken;
        }
        Self { parts }
    }

    /// Takes time in the product of both lengths at worst: on a mismatch only the last `*` is tried
    /// again, which is enough, since an earlier one could not leave a shorter rest to match.
    pub fn matches(&self, text: &str) -> bool {
        let chars: Vec<char> = text.chars().collect();
        let (mut part, mut at) = (0, 0);
        let mut last_star: Option<(usize, usize)> = None;
        while at < chars.len() {
            match self.parts.get(part) {
                Some(Part::Any) => {
                    last_star = Some((part, at));
                    part += 1;
                }
                Some(single) if single.takes(chars[at]) => {
                    part += 1;
                    at += 1;
                }
                _ => {
                    let Some((star, from)) = last_star else { return false };
                    last_star = Some((star, from + 1));
                    part = star + 1;
                    at = from + 1;
                }
            }
        }
        self.parts[part..].iter().all(|rest| *rest == Part::Any)
    }
}

impl Part {
    fn takes(&self, c: char) -> bool {
        match self {
            Self::Any => false,
            Self::One => true,
            Self::Char(own) => *own == c,
            Self::Set { ranges, negated } => {
                ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *negated
            }
        }
    }
}

/// The set behind a `[`, and how many characters it takes with its `]`. A `]` in the first place is
/// a member.
fn set(rest: &[char]) -> Option<(Part, usize)> {
    let negated = matches!(rest.first(), Some('!' | '^'));
    let start = usize::from(negated);
    let end = start + 1 + rest.get(start + 1..)?.iter().position(|&c| c == ']')?;
    let mut ranges = Vec::new();
    let mut members = &rest[start..end];
    while let Some((&low, after)) = members.split_first() {
        members = match after {
            ['-', high, after @ ..] => {
                ranges.push((low, *high));
                after
            }
            _ => {
                ranges.push((low, low));
                after
            }
        };
    }
    Some((Part::Set { ranges, negated }, end + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, text, expected) in [
            ("wordpress", "wordpress", true),
            ("wordpress", "wordpress2", false),
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("*", "anything", true),
            ("w*", "wordpress", true),
            ("*press", "wordpress", true),
            ("w*d*s", "wordpress", true),
            ("w*x", "wordpress", false),
            ("*a*b", "aab", true),
            ("wordpress/?", "wordpress/0", true),
            ("wordpress/?", "wordpress/10", false),
            ("*/1*", "mysql/10", true),
            ("[mw]*", "mysql", true),
            ("[a-c]x", "bx", true),
            ("[a-c]x", "dx", false),
            ("[!a-c]x", "dx", true),
            ("[^a-c]x", "ax", false),
            ("[]]", "]", true),
            ("[a", "[a", true),
            ("[a-]", "-", true),
            ("a[", "a[", true),
            ("ä?", "äö", true),
        ] {
            assert_eq!(Glob::new(pattern).matches(text), expected, "{pattern:?} on {text:?}");
        }
    }

    #[test]
    fn many_stars_match_in_limited_time() {
        assert!(!Glob::new(&"*a".repeat(500)).matches(&"ab".repeat(400)));
    }

    fn by_definition(parts: &[Part], text: &[char]) -> bool {
        match parts.split_first() {
            None => text.is_empty(),
            Some((Part::Any, rest)) => (0..=text.len()).any(|n| by_definition(rest, &text[n..])),
            Some((part, rest)) => {
                text.split_first().is_some_and(|(c, more)| part.takes(*c) && by_definition(rest, more))
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn the_fast_matcher_agrees_with_the_definition(
            pattern in "[ab*?\\[\\]!-]{0,8}",
            text in "[ab\\[\\]-]{0,8}",
        ) {
            let glob = Glob::new(&pattern);
            let chars: Vec<char> = text.chars().collect();
            proptest::prop_assert_eq!(glob.matches(&text), by_definition(&glob.parts, &chars));
        }
    }
}
