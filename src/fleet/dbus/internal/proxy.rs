//! The internal interface of a proxy service on its source.

use zbus::proxy;

/// The agent's object for a proxy service.
#[proxy(interface = "org.containers.hirte.internal.Proxy", default_service = "org.containers.hirte")]
pub trait Proxy {
    /// Answers an announced proxy. `instance` identifies the run of systemd on which the target is
    /// active. A text is the reason why the proxy fails.
    fn ready(&self, instance: u64, error: &str) -> zbus::Result<()>;

    /// Ends the proxy, because its target stopped or the manager no longer permits it.
    fn target_stopped(&self, reason: &str) -> zbus::Result<()>;
}
