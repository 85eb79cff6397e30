//! Certificates of machines, issued through the store. A machine writes a certificate signing
//! request below its own znode; a holder of the authority's key checks that the requested names
//! belong to that machine, and writes the certificate back. Certificates are renewed the same way
//! after two thirds of their lifetime. The formats and signatures are in `net::tls`, the znodes in
//! `store::certificates`.

pub mod expired_offers;
pub mod files;
pub mod issuer;
pub mod machine;
pub mod plan;
