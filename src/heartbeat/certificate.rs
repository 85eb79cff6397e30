//! For whom a client's certificate speaks: the components that it names, each as a whole. Pure; whether it is to be believed
//! was seen to at the door.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use super::name::Name;

/// The components that are named among its DNS names. What is no name, a pattern for many say, speaks for nobody.
pub fn names(certificate: &[u8]) -> Vec<Name> {
    let der = CertificateDer::from(certificate);
    let Ok(certificate) = EndEntityCert::try_from(&der) else { return Vec::new() };
    certificate.valid_dns_names().filter_map(|name| Name::parse(name).ok()).collect()
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn a_certificate_speaks_for_those_it_names() {
        let of = |given: &[&str]| {
            let given: Vec<String> = given.iter().map(|name| (*name).to_owned()).collect();
            let made =
                CertificateParams::new(given).unwrap().self_signed(&KeyPair::generate().unwrap()).unwrap();
            names(made.der()).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(of(&["machine-3"]), ["machine-3"]);
        assert_eq!(of(&["X0001c0s0b0n0", "node.rack"]), ["x1c0s0b0n0", "node.rack"]);
        assert!(of(&["*.rack", "10.0.0.1"]).is_empty());
        assert!(of(&[]).is_empty());
        assert!(names(b"garbage").is_empty());
    }
}
