//! Ports documents and port arguments: table tests, property tests and the corpus.

use super::*;
use proptest::prelude::*;
use std::path::PathBuf;

fn corpus(kind: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/corpus").join(kind)
}

fn open(text: &str) -> PortsDocument {
    PortsDocument::parse(text.as_bytes()).unwrap()
}

fn stored(document: &PortsDocument) -> String {
    String::from_utf8(document.to_bytes().unwrap()).unwrap()
}

fn refusal(data: &[u8]) -> String {
    PortsDocument::parse(data).unwrap_err().to_string()
}

fn port(text: &str) -> PortRange {
    parse_argument(text).unwrap()
}

#[test]
fn corpus_documents_are_accepted_or_refused_as_named() {
    let (mut accepted, mut refused) = (0, 0);
    for entry in std::fs::read_dir(corpus("ports")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let parsed = PortsDocument::parse(&std::fs::read(&path).unwrap());
        match (name.starts_with("ok-"), parsed) {
            (true, Ok(document)) => {
                assert_eq!(open(&stored(&document)), document, "{name} does not come back as it went");
                accepted += 1;
            }
            (false, Err(e)) => {
                assert!(e.to_string().len() < 300, "{name}: {e}");
                refused += 1;
            }
            (_, parsed) => panic!("{name}: {parsed:?}"),
        }
    }
    assert!(accepted >= 15 && refused >= 30, "only {accepted} and {refused} files");
}

#[test]
fn corpus_arguments_have_the_recorded_results() {
    for (file, least) in [("accepted.txt", 10), ("refused.txt", 25)] {
        let text = std::fs::read_to_string(corpus("port-args").join(file)).unwrap();
        assert!(text.lines().count() >= least);
        for line in text.lines() {
            let (argument, expected) = line.split_once(" => ").unwrap();
            let answer = match parse_argument(argument) {
                Ok(range) => range.to_string(),
                Err(e) => e.to_string(),
            };
            assert_eq!(answer, expected, "{argument:?}");
            assert_eq!(parse_argument(argument).is_ok(), file == "accepted.txt", "{argument:?}");
        }
    }
}

#[test]
fn empty_data_null_and_missing_open_mean_no_ports() {
    for text in ["", "  \n", "null", "~", "{}", "{\"open\": null}", "open:\n", "open: []"] {
        assert_eq!(open(text).ranges().count(), 0, "{text:?}");
        assert_eq!(stored(&open(text)), r#"{"open":[]}"#);
    }
}

#[test]
fn order_of_opening_is_kept_without_duplicates() {
    let mut document = open("");
    for argument in ["443", "80", "443", "53/udp", "53", "80-90"] {
        document.open(port(argument)).unwrap();
    }
    let names: Vec<_> = document.ranges().map(|range| range.to_string()).collect();
    assert_eq!(names, ["443/tcp", "80/tcp", "53/udp", "53/tcp", "80-90/tcp"]);
    let doubled = open(r#"{"open":[{"port":80,"proto":"tcp"},{"port":80,"to":80,"proto":"TCP"}]}"#);
    assert_eq!(doubled.ranges().collect::<Vec<_>>(), [port("80")]);
    document.close(port("80"));
    document.close(port("81"));
    document.open(port("80")).unwrap();
    let names: Vec<_> = document.ranges().map(|range| range.to_string()).collect();
    assert_eq!(names, ["443/tcp", "53/udp", "53/tcp", "80-90/tcp", "80/tcp"]);
}

#[test]
fn unknown_keys_are_kept() {
    let text = r#"{"v":{"a":[1,null]},"open":[{"why":"web","port":80,"proto":"tcp"}],"z":1.5}"#;
    let mut document = open(text);
    document.open(port("81")).unwrap();
    document.close(port("82"));
    assert_eq!(
        stored(&document),
        concat!(
            r#"{"open":[{"port":80,"proto":"tcp","why":"web"},{"port":81,"proto":"tcp"}],"#,
            r#""v":{"a":[1,null]},"z":1.5}"#
        )
    );
    document.close(port("80"));
    assert_eq!(stored(&document), r#"{"open":[{"port":81,"proto":"tcp"}],"v":{"a":[1,null]},"z":1.5}"#);
}

#[test]
fn yaml_of_the_first_juju_becomes_json() {
    let document = open("open:\n- {port: 80, proto: tcp}\n- {port: 53, proto: udp}\n");
    assert_eq!(stored(&document), r#"{"open":[{"port":80,"proto":"tcp"},{"port":53,"proto":"udp"}]}"#);
}

#[test]
fn errors_name_the_problem_and_the_entry() {
    for (data, text) in [
        ("[]", "not a mapping with a list \"open\""),
        ("{\"open\": 80}", "not a mapping with a list \"open\""),
        ("{\"open\": [{\"port\": 80, \"proto\": \"tcp\"}, 81]}", "entry 1 of \"open\" is not a mapping"),
        ("{\"open\": [{\"port\": 80}]}", "entry 0 of \"open\" has no proto"),
        ("{\"open\": [{\"proto\": \"tcp\"}]}", "entry 0 of \"open\" has no port"),
        (
            "{\"open\": [{\"port\": 70000, \"proto\": \"tcp\"}]}",
            "entry 0 of \"open\" has a port that is not a number from 1 to 65535",
        ),
        (
            "{\"open\": [{\"port\": 9, \"to\": 8, \"proto\": \"tcp\"}]}",
            "entry 0 of \"open\" has a range that ends before it begins",
        ),
    ] {
        assert_eq!(refusal(data.as_bytes()), text);
    }
    assert!(
        refusal(b"{\"open\": [80").starts_with("neither JSON nor YAML: EOF while parsing a list at line 1")
    );
}

#[test]
fn size_and_number_of_entries_are_limited() {
    assert_eq!(refusal(&vec![b' '; MAX_BYTES + 1]), "65537 bytes are more than the 65536 allowed for ports");
    assert!(PortsDocument::parse(&vec![b' '; MAX_BYTES]).is_ok());
    let mut document = open("");
    for number in 1..=u16::try_from(MAX_ENTRIES).unwrap() {
        document.open(PortRange::single(number, Protocol::Tcp).unwrap()).unwrap();
    }
    let full = stored(&document);
    let one_more = document.open(port("9/udp")).unwrap_err();
    assert_eq!(one_more.to_string(), "1001 open ports are more than the 1000 allowed");
    document.open(port("1")).unwrap();
    assert_eq!(stored(&open(&full)), full);
    let over = full.replace("]}", r#",{"port":9,"proto":"udp"}]}"#);
    assert_eq!(refusal(over.as_bytes()), "1001 open ports are more than the 1000 allowed");

    let mut heavy = open(&format!("{{\"x\": \"{}\"}}", "y".repeat(MAX_BYTES - 30)));
    heavy.open(port("80")).unwrap();
    assert!(heavy.to_bytes().unwrap_err().to_string().ends_with("allowed for ports"));
}

#[test]
fn long_argument_is_not_quoted_in_full() {
    for flood in ["9".repeat(10_000), "x".repeat(10_000), "/".repeat(10_000)] {
        assert!(parse_argument(&flood).unwrap_err().to_string().len() < 200);
    }
    let refusal = parse_argument("80\u{1b}[2J\n").unwrap_err().to_string();
    assert_eq!(refusal, "Invalid port, must be an integer, got '80\\u{1b}[2J\\n'");
}

fn any_range() -> impl Strategy<Value = PortRange> {
    (1u16.., 1u16.., any::<bool>()).prop_map(|(a, b, udp)| {
        let proto = if udp { Protocol::Udp } else { Protocol::Tcp };
        PortRange::new(a.min(b), a.max(b), proto).unwrap()
    })
}

/// Generates random combinations of document parts, which are valid more often than random text.
fn almost_a_document() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        "\"open\"",
        "open",
        ":",
        ": ",
        ",",
        "\n",
        "- ",
        "  ",
        "\"port\"",
        "port",
        "80",
        "65536",
        "-1",
        "\"to\"",
        "\"proto\"",
        "proto",
        "\"tcp\"",
        "udp",
        "null",
        "~",
        "&a",
        "*a",
        "!!int",
        "---\n",
        "|",
        "'",
        "\"",
        "\\u0000",
        "1e9",
        "<<",
        "?",
        "#",
    ]);
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn printed_ranges_round_trip(range in any_range()) {
        prop_assert_eq!(parse_argument(&range.to_string()), Ok(range));
    }

    #[test]
    fn argument_is_a_range_or_a_short_error(text in ".{0,80}") {
        match parse_argument(&text) {
            Ok(range) => prop_assert_eq!(parse_argument(&range.to_string()), Ok(range)),
            Err(e) => prop_assert!(e.to_string().starts_with("Invalid ") && e.to_string().len() < 400),
        }
    }

    #[test]
    fn almost_valid_arguments_never_panic(text in "[-+/0-9a-z]{0,12}") {
        if let Ok(range) = parse_argument(&text) {
            prop_assert!(range.from() >= 1 && range.from() <= range.to());
        }
    }

    #[test]
    fn random_bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(document) = PortsDocument::parse(&data) {
            prop_assert_eq!(&open(&stored(&document)), &document);
        }
    }

    #[test]
    fn almost_valid_documents_never_panic(text in almost_a_document()) {
        if let Ok(document) = PortsDocument::parse(text.as_bytes()) {
            prop_assert_eq!(&open(&stored(&document)), &document);
        }
    }

    /// Opening and closing behave as in a list without duplicates.
    #[test]
    fn document_is_an_ordered_set(steps in prop::collection::vec((any::<bool>(), 1u16..12), 0..60)) {
        let (mut document, mut model) = (open(""), Vec::new());
        for (opening, number) in steps {
            let range = PortRange::single(number, Protocol::Tcp).unwrap();
            if opening {
                document.open(range).unwrap();
                if !model.contains(&range) {
                    model.push(range);
                }
            } else {
                document.close(range);
                model.retain(|open| *open != range);
            }
            document = open(&stored(&document));
            prop_assert_eq!(&document.ranges().collect::<Vec<_>>(), &model);
        }
    }

    /// Every truncation of a stored document is refused, except the empty one.
    #[test]
    fn truncated_document_never_loses_ports(
        ranges in prop::collection::vec(any_range(), 1..6),
        cut in any::<prop::sample::Index>()
    ) {
        let mut document = open("");
        for range in ranges {
            document.open(range).unwrap();
        }
        let bytes = document.to_bytes().unwrap();
        let cut = cut.index(bytes.len());
        prop_assert!(cut == 0 || PortsDocument::parse(&bytes[..cut]).is_err());
    }
}
