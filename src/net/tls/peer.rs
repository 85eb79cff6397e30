//! The names in a peer's certificate. The handshake has verified the certificate before, and the
//! parts decide what a name allows. Pure.

use rustls::pki_types::{CertificateDer, ServerName};
use webpki::EndEntityCert;

/// Whether a server's certificate can be verified for this host: a DNS name, or an address without
/// brackets.
pub fn is_server_name(host: &str) -> bool {
    ServerName::try_from(host).is_ok()
}

/// Returns the DNS names of a certificate in DER form, without wildcards. A certificate that cannot
/// be read has no names.
pub fn dns_names(certificate: &[u8]) -> Vec<String> {
    let der = CertificateDer::from(certificate);
    let Ok(certificate) = EndEntityCert::try_from(&der) else { return Vec::new() };
    certificate.valid_dns_names().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn only_whole_dns_names_are_listed() {
        let of = |given: &[&str]| {
            let given: Vec<String> = given.iter().map(|name| (*name).to_owned()).collect();
            let made =
                CertificateParams::new(given).unwrap().self_signed(&KeyPair::generate().unwrap()).unwrap();
            dns_names(made.der())
        };
        assert_eq!(of(&["machine-3"]), ["machine-3"]);
        assert_eq!(of(&["X0001c0s0b0n0", "node.rack"]), ["X0001c0s0b0n0", "node.rack"]);
        assert!(of(&["*.rack", "10.0.0.1"]).is_empty());
        assert!(of(&[]).is_empty());
        assert!(dns_names(b"garbage").is_empty());
    }
}
