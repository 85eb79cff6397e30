//! The unit files of proxy services: `hirte-proxy@.service` on the node whose units depend on those
//! of other nodes, and `hirte-dep@.service` on the others.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use super::quoted;

pub(in crate::cli::portcullis) const PROXY_FILE: &str = "hirte-proxy@.service";
pub(in crate::cli::portcullis) const DEP_FILE: &str = "hirte-dep@.service";
const HELPER: &str = "hirte-proxy";

/// Returns the helper beside `program`.
pub(in crate::cli::portcullis) fn helper(program: &Path) -> anyhow::Result<PathBuf> {
    let helper = program.with_file_name(HELPER);
    if !helper.is_file() {
        bail!("{} is missing; it belongs beside {}", helper.display(), program.display());
    }
    Ok(helper)
}

/// Returns the unit file of proxies. `ExecStopPost=` also runs after a start that failed or was
/// cancelled, `ExecStop=` does not.
pub(in crate::cli::portcullis) fn proxy_unit(helper: &Path, user: bool) -> anyhow::Result<String> {
    let helper = quoted(helper).context("the helper of proxy services")?;
    let bus = if user { " --user" } else { "" };
    Ok(format!(
        "[Unit]\n\
         Description=Proxy of a systemd unit of another node: %i\n\
         After=portcullis-agent.service portcullis.service\n\
         StopWhenUnneeded=yes\n\
         \n\
         [Service]\n\
         Type=oneshot\n\
         RemainAfterExit=yes\n\
         ExecStart={helper}{bus} create %n\n\
         ExecStopPost={helper}{bus} remove %n\n\
         # The start is cancelled; that is no failure.\n\
         SuccessExitStatus=SIGTERM\n\
         TimeoutStartSec=10min\n"
    ))
}

/// Returns the unit file of the services that keep a unit needed.
pub(in crate::cli::portcullis) fn dep_unit() -> String {
    "[Unit]\n\
     Description=Use of %i by proxy services of other nodes\n\
     BindsTo=%i.service\n\
     After=%i.service\n\
     \n\
     [Service]\n\
     Type=oneshot\n\
     RemainAfterExit=yes\n\
     ExecStop=/bin/true\n"
        .to_owned()
}
