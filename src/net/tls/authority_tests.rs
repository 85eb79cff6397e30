//! Certificates that an authority issues, read again and tried in handshakes.

use proptest::prelude::*;

use super::*;

const NOW: u64 = 1_800_000_000_000;
const DAY: u64 = 86_400_000;

fn authority() -> Authority {
    Authority::create("prod", &PrivateKey::generate().unwrap(), NOW).unwrap()
}

#[test]
fn an_issued_certificate_has_the_names_the_key_and_the_validity() {
    let (ca, key) = (authority(), PrivateKey::generate().unwrap());
    let names = Names::of(["machine-3", "Node-A.example", "10.0.0.3", "fd00::3"]);
    let request = Request::parse(&key.request(&Names::of(["machine-3"])).unwrap()).unwrap();
    assert_eq!(request.names(), &Names::of(["machine-3"]));
    let validity = Validity::starting(NOW, MACHINE_LIFETIME);
    let chain = ca.issue(&request, &names, validity).unwrap();
    let issued = Certificate::parse(&chain).unwrap();
    assert_eq!(issued.names(), &names);
    assert_eq!(issued.names().to_string(), "machine-3, node-a.example, 10.0.0.3, fd00::3");
    assert_eq!(issued.validity(), validity);
    assert_eq!(validity.until_ms, NOW + 90 * DAY);
    assert!(request.has_key_of(&issued) && !issued.is_ca());
    assert!(chain.ends_with(ca.certificate()));
    let for_key = Certificate::parse(&ca.issue_for(&key, &names, validity).unwrap()).unwrap();
    assert!(request.has_key_of(&for_key));
    let other =
        Certificate::parse(&ca.issue_for(&PrivateKey::generate().unwrap(), &names, validity).unwrap());
    assert!(!request.has_key_of(&other.unwrap()));
}

#[test]
fn certificates_are_renewed_after_two_thirds() {
    let validity = Validity { from_ms: 1000, until_ms: 91_000 };
    assert_eq!(validity.renew_at_ms(), 61_000);
}

#[test]
fn an_authority_is_loaded_from_its_own_files_only() {
    let (ca, other) = (authority(), authority());
    let loaded = Authority::load(ca.certificate(), ca.key()).unwrap();
    assert_eq!(loaded.certificate(), ca.certificate());
    let fingerprint = |ca: &Authority| Certificate::parse(ca.certificate()).unwrap().fingerprint();
    assert_eq!(fingerprint(&loaded), fingerprint(&ca));
    assert_ne!(fingerprint(&other), fingerprint(&ca));
    assert_eq!(fingerprint(&ca).to_string().parse(), Ok(fingerprint(&ca)));
    assert!(format!("{ca:?}").contains("BEGIN CERTIFICATE") && !format!("{ca:?}").contains("PRIVATE"));
    let refused = |certificate: &str, key| Authority::load(certificate, key).unwrap_err();
    assert_eq!(refused(ca.certificate(), other.key()), AuthorityError::OtherKey);
    assert_eq!(refused("hello", ca.key()), AuthorityError::InvalidCa);
    let leaf = ca.issue_for(ca.key(), &Names::of(["a"]), Validity::starting(NOW, ROLE_LIFETIME)).unwrap();
    assert_eq!(refused(&leaf, ca.key()), AuthorityError::InvalidCa);
}

#[test]
fn invalid_requests_are_refused_with_the_reason() {
    let key = PrivateKey::generate().unwrap();
    let valid = key.request(&Names::of(["machine-3"])).unwrap();
    let der = pem_body(&valid);
    // The last bytes are those of the signature.
    let mut forged = der.clone();
    let at = forged.len() - 4;
    forged[at] ^= 1;
    let other_type = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let other_type = CertificateParams::default().serialize_request(&other_type).unwrap().pem().unwrap();
    let mut mail = CertificateParams::default();
    mail.subject_alt_names = vec![SanType::Rfc822Name("a@example.org".try_into().unwrap())];
    let mail = mail.serialize_request(&key.pair().unwrap()).unwrap().pem().unwrap();
    let with_names = |names: &[&str]| {
        let mut params = CertificateParams::default();
        params.subject_alt_names =
            names.iter().map(|name| SanType::DnsName((*name).try_into().unwrap())).collect();
        params.serialize_request(&key.pair().unwrap()).unwrap().pem().unwrap()
    };
    let no_dns_name = "it asks for a name that is no DNS name";
    let label = "a".repeat(63);
    let many = Names::of((0..=MAX_NAMES).map(|number| format!("n{number}")));
    for (pem, reason) in [
        ("".to_owned(), "it cannot be parsed"),
        ("x".repeat(MAX_REQUEST_BYTES + 1), "it is too long"),
        (pem_of(&der[..der.len() / 2]), "it cannot be parsed"),
        (pem_of(&forged), "its signature is wrong"),
        (other_type, "its key is not of the type ECDSA P-256"),
        (mail, "it asks for other names than DNS names and addresses"),
        (key.request(&many).unwrap(), "it asks for too many names"),
        (with_names(&["machine-3"; MAX_NAMES + 1]), "it asks for too many names"),
        (with_names(&["machine-3", "a\nb"]), no_dns_name),
        (with_names(&["\u{1b}[2J"]), no_dns_name),
        (with_names(&["*"]), no_dns_name),
        (with_names(&[""]), no_dns_name),
        (with_names(&[&[&*label; 4].join(".")]), no_dns_name),
    ] {
        assert_eq!(Request::parse(&pem).unwrap_err(), AuthorityError::InvalidRequest(reason));
    }
    assert!(Request::parse(&valid).is_ok());
}

fn pem_body(pem: &str) -> Vec<u8> {
    use base64::Engine as _;
    let lines: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
    base64::engine::general_purpose::STANDARD.decode(lines).unwrap()
}

fn pem_of(der: &[u8]) -> String {
    use base64::Engine as _;
    let body = base64::engine::general_purpose::STANDARD.encode(der);
    format!("-----BEGIN CERTIFICATE REQUEST-----\n{body}\n-----END CERTIFICATE REQUEST-----\n")
}

#[test]
fn names_that_are_no_dns_names_are_refused() {
    let (ca, key) = (authority(), PrivateKey::generate().unwrap());
    for bad in ["", "a b", "ä", "*", "a..b", "a/b"] {
        let issued = ca.issue_for(&key, &Names::of([bad]), Validity::starting(NOW, ROLE_LIFETIME));
        assert_eq!(issued.unwrap_err(), AuthorityError::InvalidName(bad.to_owned()));
    }
    let refused = AuthorityError::InvalidName("a\n\u{1b}".to_owned());
    assert_eq!(refused.to_string(), r"'a\n\u{1b}' is not a DNS name");
}

#[test]
fn a_name_outside_the_permitted_ones_is_found() {
    let permitted = Names::of(["machine-3", "10.0.0.3"]);
    for (asked, outside) in [
        (&["machine-3"][..], None),
        (&["MACHINE-3", "10.0.0.3"], None),
        (&[], None),
        (&["machine-4", "machine-3"], Some("machine-4")),
        (&["machine-3", "10.0.0.4"], Some("10.0.0.4")),
    ] {
        assert_eq!(Names::of(asked).first_outside(&permitted).as_deref(), outside);
    }
}

proptest! {
    #[test]
    fn any_text_is_parsed_without_a_panic(text in "\\PC{0,200}") {
        prop_assert!(Request::parse(&text).is_err());
        prop_assert!(Certificate::parse(&text).is_err());
        prop_assert!(text.parse::<crate::net::tls::certificate::Fingerprint>().is_err());
    }

    #[test]
    fn cut_off_certificates_are_parsed_without_a_panic(cut in 0usize..400) {
        let ca = authority();
        let der = pem_body(ca.certificate());
        prop_assert_eq!(Certificate::parse_der(&der[..cut.min(der.len() - 1)]), None);
    }
}
