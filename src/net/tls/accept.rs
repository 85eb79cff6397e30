//! The handshake of an accepted connection. The caller bounds its time.

use std::io;

use bytes::Bytes;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::ServerTls;

impl ServerTls {
    /// Returns the connection and the client's certificate in DER form, if it presented one.
    ///
    /// # Errors
    /// If the handshake fails.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<(TlsStream<TcpStream>, Option<Bytes>)> {
        let stream = TlsAcceptor::from(self.config()).accept(stream).await?;
        self.count(stream.get_ref().1.handshake_kind());
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let certificate = certificate.map(|certificate| Bytes::copy_from_slice(certificate));
        Ok((stream, certificate))
    }
}

/// Returns the first certificate of a PEM file, in DER form.
pub fn certificate_in(pem: &[u8]) -> Option<Bytes> {
    let first = CertificateDer::pem_slice_iter(pem).next()?;
    first.ok().map(|certificate| Bytes::copy_from_slice(&certificate))
}
