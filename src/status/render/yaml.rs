//! A document as block YAML in the format of the first Juju: lists not indented, empty maps `{}`,
//! quotes only for text that YAML 1.1 or 1.2 would parse as another type. Pure.

use std::fmt::Write;

use super::{Doc, Key};

pub fn render(doc: &Doc) -> String {
    let mut out = String::new();
    match doc {
        Doc::Map(entries) if !entries.is_empty() => map(&mut out, entries, 0),
        Doc::List(items) if !items.is_empty() => list(&mut out, items, 0),
        plain => {
            inline(&mut out, plain);
            out.push('\n');
        }
    }
    out
}

fn map(out: &mut String, entries: &[(Key, Doc)], indent: usize) {
    for (key, value) in entries {
        pad(out, indent);
        map_entry(out, key, value, indent);
    }
}

fn map_entry(out: &mut String, key: &Key, value: &Doc, indent: usize) {
    match key {
        Key::Int(n) => number(out, *n),
        Key::Text(text) => scalar(out, text),
    }
    out.push(':');
    match value {
        Doc::Map(entries) if !entries.is_empty() => {
            out.push('\n');
            map(out, entries, indent + 2);
        }
        Doc::List(items) if !items.is_empty() => {
            out.push('\n');
            list(out, items, indent);
        }
        plain => {
            out.push(' ');
            inline(out, plain);
            out.push('\n');
        }
    }
}

fn list(out: &mut String, items: &[Doc], indent: usize) {
    for item in items {
        pad(out, indent);
        out.push_str("- ");
        match item {
            Doc::Map(entries) if !entries.is_empty() => {
                let mut rest = entries.iter();
                if let Some((key, value)) = rest.next() {
                    map_entry(out, key, value, indent + 2);
                }
                map(out, rest.as_slice(), indent + 2);
            }
            Doc::List(items) if !items.is_empty() => {
                let mut nested = String::new();
                list(&mut nested, items, indent + 2);
                out.push_str(nested.trim_start_matches(' '));
            }
            plain => {
                inline(out, plain);
                out.push('\n');
            }
        }
    }
}

/// A value on the line of its key or dash. Non-empty maps and lists are written by the caller.
fn inline(out: &mut String, doc: &Doc) {
    match doc {
        Doc::Map(_) => out.push_str("{}"),
        Doc::List(_) => out.push_str("[]"),
        Doc::Text(text) => scalar(out, text),
        Doc::Int(n) => number(out, *n),
        Doc::Bool(yes) => out.push_str(if *yes { "true" } else { "false" }),
        Doc::Null => out.push_str("null"),
    }
}

fn number(out: &mut String, n: u64) {
    // Writing to a String cannot fail.
    let _ = write!(out, "{n}");
}

fn pad(out: &mut String, indent: usize) {
    out.extend(std::iter::repeat_n(' ', indent));
}

fn scalar(out: &mut String, text: &str) {
    if is_plain(text) {
        out.push_str(text);
    } else if text.chars().any(needs_escape) {
        double_quoted(out, text);
    } else {
        out.push('\'');
        out.push_str(&text.replace('\'', "''"));
        out.push('\'');
    }
}

/// Control characters, line separators and byte order marks.
fn needs_escape(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

fn double_quoted(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if needs_escape(c) => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Whether every parser reads the text as itself without quotes.
/// Quotes that may not be necessary are harmless.
fn is_plain(text: &str) -> bool {
    let Some(first) = text.chars().next() else { return false };
    let safe = |c: char| c.is_ascii_alphanumeric() || " _-./:@+=,()~%^$;'<>#".contains(c);
    (first.is_ascii_alphanumeric() || "_./$^(;".contains(first))
        && text.chars().all(safe)
        && !text.contains(": ")
        && !text.contains(" #")
        && !text.ends_with([':', ' '])
        && !is_reserved_word(text)
        && !is_number_like(text)
}

fn is_reserved_word(text: &str) -> bool {
    const WORDS: [&str; 15] = [
        "y", "n", "yes", "no", "on", "off", "true", "false", "null", ".inf", ".nan", "inf", "nan",
        "infinity", ".",
    ];
    WORDS.iter().any(|word| text.eq_ignore_ascii_case(word))
}

/// Integers in any base, floats, sexagesimals and dates. An address with two dots or more is none
/// of these.
fn is_number_like(text: &str) -> bool {
    let head = text.as_bytes();
    let numeric = |b: &u8| b.is_ascii_digit() || b"_.:+-eE".contains(b);
    let prefixed = head.len() > 1 && head[0] == b'0' && b"xXoObB".contains(&head[1]);
    let dated = head.len() > 4
        && head[..4].iter().all(u8::is_ascii_digit)
        && head[4] == b'-'
        && head.iter().all(|b| b.is_ascii_digit() || b"-:.+ tTzZ".contains(b));
    let dots = head.iter().filter(|&&b| b == b'.').count();
    let starts = head.iter().find(|&&b| b != b'.').is_some_and(u8::is_ascii_digit);
    prefixed || dated || (starts && dots < 2 && head.iter().all(numeric))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn one(text: &str) -> String {
        render(&Doc::Text(text.to_owned())).trim_end_matches('\n').to_owned()
    }

    #[test]
    fn values_of_status_need_no_quotes() {
        for plain in [
            "80/tcp",
            "8000-8080/tcp",
            "local:mysql-1",
            "wordpress/0",
            "ec2-1.example.com",
            "10.0.0.1",
            "i-0abc",
            "running",
            "/units/unit-0000000001/ports is not JSON",
            "127.0.0.1:2181",
        ] {
            assert_eq!(one(plain), plain);
        }
    }

    #[test]
    fn text_that_yaml_would_read_as_another_type_is_quoted() {
        for (text, shown) in [
            ("", "''"),
            ("yes", "'yes'"),
            ("Null", "'Null'"),
            ("~", "'~'"),
            ("12", "'12'"),
            ("0x1f", "'0x1f'"),
            ("1e3", "'1e3'"),
            ("1.5", "'1.5'"),
            ("1:30", "'1:30'"),
            ("2001-01-01", "'2001-01-01'"),
            (".inf", "'.inf'"),
            ("a: b", "'a: b'"),
            ("a #b", "'a #b'"),
            ("a:", "'a:'"),
            ("- a", "'- a'"),
            ("it's: so", "'it''s: so'"),
            ("{a}", "'{a}'"),
            ("a\nb\u{7}\"\\", "\"a\\nb\\u0007\\\"\\\\\""),
        ] {
            assert_eq!(one(text), shown, "{text:?}");
        }
    }

    #[test]
    fn lists_are_not_indented_and_empty_things_are_inline() {
        let doc = Doc::Map(vec![
            (Key::Int(0), Doc::Map(vec![("list".into(), Doc::List(vec![Doc::Int(1), Doc::Null]))])),
            ("empty".into(), Doc::Map(vec![])),
            ("none".into(), Doc::List(vec![])),
            ("yes".into(), Doc::Bool(true)),
        ]);
        assert_eq!(render(&doc), "0:\n  list:\n  - 1\n  - null\nempty: {}\nnone: []\n'yes': true\n");
        assert_eq!(render(&Doc::Map(vec![])), "{}\n");
    }

    fn any_doc() -> impl Strategy<Value = Doc> {
        let text = prop_oneof![any::<String>(), "[ -~]{0,12}", "[0-9.:_eE+x-]{1,8}", "[a-zA-Z~.]{1,5}"];
        let leaf = prop_oneof![
            text.prop_map(Doc::Text),
            any::<u32>().prop_map(|n| Doc::Int(n.into())),
            any::<bool>().prop_map(Doc::Bool),
            Just(Doc::Null),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Doc::List),
                prop::collection::btree_map("[ -~]{0,8}", inner, 0..4)
                    .prop_map(|map| Doc::Map(map.into_iter().map(|(k, v)| (Key::Text(k), v)).collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_yaml_parser_reads_the_same_document(doc in any_doc()) {
            let text = render(&doc);
            let read: Value = serde_saphyr::from_str(&text)
                .unwrap_or_else(|error| panic!("{text:?}: {error}"));
            prop_assert_eq!(read, serde_json::to_value(&doc).unwrap(), "{}", text);
        }
    }
}
