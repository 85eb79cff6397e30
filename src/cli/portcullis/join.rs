//! `portcullis join`: makes this host a machine of an environment with a token of `juju
//! add-machine`. Verifies the store by the CA's fingerprint, gets the machine's credentials and a
//! certificate for a key that is created here, writes the machine file and, on request, installs
//! and starts the service. The same command continues after a crash at any point.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::cli::args::hook_user;
use crate::cli::config::ConfigDir;
use crate::cli::error::{Refusal, Usage};
use crate::cli::file;
use crate::cli::output;
use crate::cli::portcullis::machine_service::MachineService;
use crate::cli::portcullis::{machine, machine_file, up};
use crate::identity::files::MachineIdentity;
use crate::identity::machine::Machine as Applicant;
use crate::machine::file::MachineFile;
use crate::machine::join_token::JoinToken;
use crate::model::{EnvironmentName, MachineId};
use crate::net::tls::pin::fetch_ca;
use crate::net::tls::probe::HandshakeFailure;
use crate::runtime::clock::wall_ms;
use crate::store::address::name_of;
use crate::store::joining::{JoinError, Offer};
use crate::store::{Address, ZkTree};

/// The longest token that is read from stdin.
const MAX_TOKEN_BYTES: u64 = 16 * 1024;

/// How long to wait for a host of the store that the token names.
const VERIFY_TIMEOUT: Duration = Duration::from_secs(8);

/// How long to wait for a certificate. Without a running issuer there is none, and the agent
/// requests it again.
const ISSUER_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Token that `juju add-machine` printed; `-` reads it from stdin
    #[arg(value_name = "TOKEN")]
    token: String,
    /// Install the agent as a systemd service and start it (as root)
    #[arg(long)]
    service: bool,
    /// With --service: user that runs the hooks of units: see `portcullis machine --help`
    #[arg(long, value_name = "USER", default_value = hook_user::USUAL)]
    hook_user: String,
}

/// The directories for the files of the machine.
struct Directories {
    config: ConfigDir,
    data: PathBuf,
}

impl Directories {
    /// Returns the directories of the service, or those of this user.
    fn of(args: &Args, environment: &EnvironmentName) -> anyhow::Result<Self> {
        if args.service {
            let data = Path::new("/var/lib/portcullis").join(environment.as_str());
            return Ok(Self { config: ConfigDir::of_services(), data });
        }
        Ok(Self { config: ConfigDir::of_this_user()?, data: up::data_dir(environment, None)? })
    }
}

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let token: JoinToken = read_token(&args.token)?.parse().map_err(Usage::new)?;
    let (machine, environment) = (token.machine, token.environment.clone());
    let service = MachineService { environment: &environment, machine, hook_user: &args.hook_user };
    let service = args.service.then_some(service);
    service.as_ref().map_or(Ok(()), MachineService::check)?;
    let directories = Directories::of(args, &environment)?;
    let path = directories.config.machine(&environment, machine);
    let identity = machine::identity_files(&directories.data, machine)?;
    let file = match machine_file::read(&path)? {
        Some(_) if service.is_none() => {
            return Err(Refusal::AlreadyJoined { environment, machine, path }.into());
        }
        Some(file) => {
            output::message(&format!("This host is machine {machine} already: {} exists", path.display()));
            file
        }
        None => {
            let file = redeem(&token, &path, &identity).await?;
            let path = path.display();
            output::message(&format!("Machine {machine} has joined '{environment}': {path} written"));
            file
        }
    };
    match certificate(machine, &file, &identity).await? {
        Some(path) => output::message(&format!("Certificate written: {}", path.display())),
        None => output::message("No certificate yet; the agent requests it again when it runs"),
    }
    match service {
        Some(service) => service.start(),
        None => {
            output::hint(&format!("`portcullis machine -e {environment} --id {machine}` starts its agent"));
            Ok(())
        }
    }
}

fn read_token(given: &str) -> anyhow::Result<String> {
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut text = String::new();
    let read = std::io::stdin().take(MAX_TOKEN_BYTES).read_to_string(&mut text);
    read.context("cannot read the token from stdin")?;
    Ok(text)
}

/// Returns the store's address with the CA certificate that the token names.
async fn verified_address(token: &JoinToken) -> anyhow::Result<Address> {
    let Some(fingerprint) = &token.fingerprint else {
        if !token.store.is_loopback() {
            output::message("The connection to the store is not encrypted; use a network that you trust");
        }
        return Ok(token.store.clone());
    };
    // All hosts are asked at the same time: some may be down.
    let hosts = token.store.hosts();
    let fetch = async |host: &str| {
        let stream = TcpStream::connect(host).await.ok()?;
        Some((host.to_owned(), fetch_ca(name_of(host), stream, fingerprint).await))
    };
    let mut fetching: FuturesUnordered<_> = hosts.split(',').map(fetch).collect();
    let mut problem = None;
    let found = async {
        while let Some(fetched) = fetching.next().await {
            match fetched {
                Some((_, Ok(ca))) => return Some(ca),
                Some((host, Err(Some(failure)))) => problem = problem.take().or(Some((host, failure))),
                Some((_, Err(None))) | None => {}
            }
        }
        None
    };
    if let Ok(Some(ca)) = timeout(VERIFY_TIMEOUT, found).await {
        return Ok(token.store.clone().with_ca(Some(&ca)));
    }
    let machine = token.machine;
    Err(match problem {
        Some((host, HandshakeFailure::NoCa)) => Refusal::NoCaToVerify { host }.into(),
        Some((host, why)) => Refusal::OtherStoreThanToken { machine, host, why }.into(),
        None => anyhow::anyhow!("cannot reach the store at {}", token.store),
    })
}

/// Gets the machine's credentials. They are in an unfinished file until the token is used up, so
/// that the same token works again after a crash.
async fn redeem(token: &JoinToken, path: &Path, identity: &MachineIdentity) -> anyhow::Result<MachineFile> {
    let unfinished = path.with_extension("joining");
    let begun = machine_file::read(&unfinished)?;
    if begun.is_none() {
        token.check_time(wall_ms())?;
    }
    // The public key names this host: another one may have used the token meanwhile.
    let host = identity.ensure_key()?.fingerprint()?;
    let address = verified_address(token).await?;
    let tree = ZkTree::connect(&address, Some(&token.credential)).await?;
    let work = async {
        let read = Offer::read(&tree, token.machine, token.offer, wall_ms()).await;
        let offer = match (read, begun) {
            (Err(JoinError::Used { by: Some(by), .. }), Some(begun)) if by == host => return Ok(begun),
            (read, _) => read?,
        };
        let (credential, roles) = (offer.credential.clone(), offer.roles.clone());
        let file = MachineFile { address, credential, roles, directories: None };
        machine_file::write(&unfinished, &file)?;
        offer.use_up(&tree, token.machine, (wall_ms(), &host)).await?;
        Ok(file)
    };
    let done: anyhow::Result<MachineFile> = work.await;
    tree.close().await;
    if let Err(error) = &done
        && is_definite(error)
    {
        // This host is not the machine, so nothing secret of the machine stays here.
        machine_file::remove(&unfinished)?;
    }
    let file = done?;
    file::rename(&unfinished, path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(file)
}

/// Whether the store has refused the token. After other failures the same command may continue.
fn is_definite(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<JoinError>() {
        Some(JoinError::Store(_)) | None => false,
        Some(_) => true,
    }
}

/// Gets a certificate for the machine's key. Returns the certificate's path, or `None` if no issuer
/// answered in time.
async fn certificate(
    machine: MachineId,
    file: &MachineFile,
    files: &MachineIdentity,
) -> anyhow::Result<Option<PathBuf>> {
    let key = files.ensure_key()?;
    let tree = ZkTree::connect(&file.address, Some(&file.credential)).await?;
    let identity = file.credential.identity();
    let applicant = Applicant { id: machine, identity, roles: file.roles.clone() };
    let obtained = timeout(ISSUER_TIMEOUT, applicant.obtain(&tree, &key)).await;
    tree.close().await;
    let Ok(chain) = obtained else { return Ok(None) };
    files.install(&chain?)?;
    Ok(Some(files.files().certificates))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::cli::authority;
    use crate::cli::config::Role;
    use crate::machine::join_token::LIFETIME_MS;
    use crate::net::tls::authority::{Authority, Names, ROLE_LIFETIME, Validity};
    use crate::net::tls::certificate::Certificate;
    use crate::net::tls::key::PrivateKey;
    use crate::net::tls::{ServerFiles, ServerTls};
    use crate::store::Credential;
    use crate::store::joining::OfferKind;

    /// A limit that only a hang reaches. All hosts one after another would take longer.
    const HANG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn hosts_that_do_not_answer_do_not_delay_the_one_that_does() {
        let home = tempfile::tempdir().unwrap();
        let (config, environment) = (ConfigDir::below(home.path()), "prod".parse().unwrap());
        file::ensure_private_dir(&config.identity(&environment)).unwrap();
        let authority = Authority::create("prod", &PrivateKey::generate().unwrap(), wall_ms()).unwrap();
        let files = authority::role_identity(&config, &environment, Role::Controller);
        let validity = Validity::starting(wall_ms(), ROLE_LIFETIME);
        let names = Names::of(["127.0.0.1"]);
        files.install(&authority.issue_for(&files.ensure_key().unwrap(), &names, validity).unwrap()).unwrap();
        let tls = ServerTls::load(ServerFiles { identity: files.files(), client_ca: None }).unwrap();
        let mut silent = Vec::new();
        for _ in 0..31 {
            silent.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let hosts: Vec<_> = silent.iter().chain([&listener]).map(|l| l.local_addr().unwrap()).collect();
        let hosts = hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let serving = async {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                // The client ends the connection after the handshake.
                drop(tls.accept(stream).await);
            }
        };
        let fingerprint = Certificate::parse(authority.certificate()).unwrap().fingerprint();
        let token = JoinToken {
            environment: environment.clone(),
            machine: MachineId::new(3),
            store: format!("tls://{hosts}").parse().unwrap(),
            fingerprint: Some(fingerprint.to_string()),
            credential: Credential::parse("join:x").unwrap(),
            expires_ms: wall_ms() + LIFETIME_MS,
            offer: OfferKind::Operator,
        };
        let verified = tokio::select! {
            verified = timeout(HANG, verified_address(&token)) => verified.expect("no hang").unwrap(),
            () = serving => unreachable!(),
        };
        assert_eq!(verified.ca(), Some(authority.certificate()));
    }
}
