//! Several etcd processes that form one cluster, whose inner links can be cut.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::testing::failed;
use crate::testing::metrics;
use crate::testing::peers::PeerNet;
use crate::testing::ports::Port;
use crate::testing::server::{EtcdServer, Options, Place, again_on_taken_port, fresh_name};

/// How long a member may take to say whether it leads.
const ASK_LIMIT: Duration = Duration::from_secs(1);
const LEADER_LIMIT: Duration = Duration::from_secs(30);

/// Sets up an [`EtcdCluster`]; the options are those of
/// [`ServerBuilder`](crate::testing::ServerBuilder), for every member.
#[derive(Debug, Clone)]
#[must_use = "nothing runs before `start`"]
pub struct ClusterBuilder {
    size: usize,
    options: Options,
}

impl ClusterBuilder {
    /// The `etcd` to run. Default = `ETCD_BIN`, else the one on `PATH`.
    pub fn binary(mut self, path: impl Into<PathBuf>) -> ClusterBuilder {
        self.options.binary = Some(path.into());
        self
    }

    /// Adds arguments to the command line of every member.
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> ClusterBuilder {
        self.options.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Turns authentication on once the cluster runs. Default = off.
    pub fn auth(mut self, user: impl Into<String>, password: impl Into<String>) -> ClusterBuilder {
        self.options.credentials = Some((user.into(), password.into()));
        self
    }

    /// Heartbeats of 10 ms and elections of 100 ms, which allow leases of one second.
    ///
    /// Default = etcd's 100 ms and 1 s. On a loaded machine the fast ones elect without need.
    pub fn fast_ticks(mut self) -> ClusterBuilder {
        self.options.fast_ticks = true;
        self
    }

    /// Where the directories with data and logs are made. Default = the system's directory for
    /// temporary files.
    pub fn data_dir_in(mut self, dir: impl Into<PathBuf>) -> ClusterBuilder {
        self.options.dir = Some(dir.into());
        self
    }

    /// Starts all members and waits until each of them serves and one leads.
    ///
    /// # Errors
    ///
    /// `InvalidArgument`: no members were asked for. `Testing`: no `etcd` or no `etcdctl` was
    /// found, or a member does not come up; the message carries the end of its log.
    pub fn start(self) -> Result<EtcdCluster> {
        if self.size == 0 {
            return Err(Error::invalid("a cluster of 0 members"));
        }
        again_on_taken_port(|| self.start_once())
    }

    fn start_once(&self) -> Result<EtcdCluster> {
        let mut net = PeerNet::default();
        let mut ports = Vec::new();
        for _ in 0..self.size {
            let (client, peer) = (Port::claim()?, Port::claim()?);
            let gate = net.add_gate(peer.number())?;
            ports.push((client, peer, gate));
        }
        let initial_cluster: Vec<String> =
            ports.iter().enumerate().map(|(i, (_, _, gate))| format!("m{i}={gate}")).collect();
        let initial_cluster = initial_cluster.join(",");
        let token = fresh_name("cluster");
        let mut members = Vec::new();
        for (i, (client, peer, advertised_peer)) in ports.into_iter().enumerate() {
            let place = Place {
                name: format!("m{i}"),
                client,
                peer,
                advertised_peer,
                initial_cluster: initial_cluster.clone(),
                token: token.clone(),
                alone: false,
            };
            members.push(EtcdServer::prepare(&self.options, place)?);
        }
        let mut cluster = EtcdCluster { members, net, ids: Vec::new() };
        cluster.launch_all()?;
        cluster.ids = cluster.read_ids()?;
        let names = cluster.ids.iter().cloned().enumerate().map(|(i, id)| (id, i)).collect();
        cluster.net.name_members(names);
        cluster.wait_leader(LEADER_LIMIT)?;
        cluster.members[0].enable_auth()?;
        Ok(cluster)
    }
}

/// Real etcd processes on loopback that form one cluster.
///
/// Each member is an [`EtcdServer`]; what can be done to that can be done to a member. Besides, a
/// member can be cut off from its peers while clients still reach it. Dropping the cluster ends
/// all of it.
///
/// # Example: the leader is cut off and another takes over
///
/// ```no_run
/// use std::time::Duration;
/// use etcd_recipes::testing::EtcdCluster;
///
/// # fn main() -> etcd_recipes::Result<()> {
/// let cluster = EtcdCluster::start(3)?;
/// let old = cluster.leader()?;
/// cluster.isolate(old);
/// let new = cluster.wait_leader(Duration::from_secs(10))?;
/// assert_ne!(new, old);
/// cluster.rejoin(old);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct EtcdCluster {
    // The members end before the links between them.
    members: Vec<EtcdServer>,
    net: PeerNet,
    ids: Vec<String>,
}

impl EtcdCluster {
    /// Starts a cluster of `size` members with the defaults of
    /// [`builder`](EtcdCluster::builder).
    ///
    /// # Errors
    ///
    /// As [`ClusterBuilder::start`].
    pub fn start(size: usize) -> Result<EtcdCluster> {
        EtcdCluster::builder(size).start()
    }

    /// Says how to start a cluster of `size` members.
    pub fn builder(size: usize) -> ClusterBuilder {
        ClusterBuilder { size, options: Options::default() }
    }

    fn launch_all(&self) -> Result<()> {
        self.members.iter().try_for_each(EtcdServer::launch)?;
        self.members.iter().try_for_each(EtcdServer::wait_ready)
    }

    /// The ids in etcd's own spelling, by member.
    fn read_ids(&self) -> Result<Vec<String>> {
        let list = self.members[0].plain_ctl(&["member", "list"])?;
        let mut ids: HashMap<&str, &str> = HashMap::new();
        for line in list.lines() {
            let mut fields = line.split(", ");
            if let (Some(id), Some(_status), Some(name)) =
                (fields.next(), fields.next(), fields.next())
            {
                ids.insert(name, id);
            }
        }
        (0..self.members.len())
            .map(|i| {
                let id = ids.get(format!("m{i}").as_str());
                id.map(|id| (*id).to_owned())
                    .ok_or_else(|| failed(format!("etcd does not list the member m{i}:\n{list}")))
            })
            .collect()
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// A member, counted from 0.
    ///
    /// # Panics
    ///
    /// When there is no such member.
    pub fn member(&self, index: usize) -> &EtcdServer {
        &self.members[index]
    }

    /// The client URLs of all members, in order.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(EtcdServer::endpoint).collect()
    }

    /// The member that leads now. A leader that is cut off from its peers does not count: it may
    /// not know yet that it leads no more.
    ///
    /// # Errors
    ///
    /// `Testing`: none leads, or none says so within a second.
    pub fn leader(&self) -> Result<usize> {
        (0..self.members.len())
            .find(|index| !self.net.is_cut_off(*index) && self.claims_to_lead(*index))
            .ok_or_else(|| failed("no member of the cluster leads"))
    }

    /// Whether a member believes that it leads; one that does not answer within a second does not.
    ///
    /// # Panics
    ///
    /// When there is no such member.
    pub fn claims_to_lead(&self, index: usize) -> bool {
        let member = &self.members[index];
        if member.pid().is_none() {
            return false;
        }
        member.metrics_within(ASK_LIMIT).is_ok_and(|text| {
            metrics::samples(&text, "etcd_server_is_leader").any(|sample| sample.value == 1.0)
        })
    }

    /// Waits until a member leads that is not cut off, and returns it.
    ///
    /// # Errors
    ///
    /// `Testing`: `limit` passed first.
    pub fn wait_leader(&self, limit: Duration) -> Result<usize> {
        let end = Instant::now() + limit;
        loop {
            match self.leader() {
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
                Err(_) => return Err(failed(format!("no leader within {limit:?}"))),
                leader => return leader,
            }
        }
    }

    /// Makes a member the leader and waits until it leads.
    ///
    /// # Errors
    ///
    /// `Testing`: etcd refuses, or the member does not lead within thirty seconds.
    ///
    /// # Panics
    ///
    /// When there is no such member.
    pub fn move_leader(&self, index: usize) -> Result<()> {
        let leader = self.leader()?;
        if leader == index {
            return Ok(());
        }
        self.members[leader].ctl(["move-leader", &self.ids[index]])?;
        let end = Instant::now() + LEADER_LIMIT;
        while !self.claims_to_lead(index) {
            if Instant::now() >= end {
                return Err(failed(format!("m{index} does not lead within {LEADER_LIMIT:?}")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Cuts a member off from its peers, in both directions; clients still reach it.
    ///
    /// Several may be cut off at a time; they do not reach each other either.
    ///
    /// # Panics
    ///
    /// When there is no such member.
    pub fn isolate(&self, index: usize) {
        assert!(index < self.members.len(), "no member {index}");
        self.net.cut_off(index);
    }

    /// Lets a member that was cut off reach its peers again.
    pub fn rejoin(&self, index: usize) {
        self.net.join(index);
    }

    /// Kills all members and starts them with their addresses and their data, at the same time,
    /// since none serves before most run.
    ///
    /// # Errors
    ///
    /// As [`ClusterBuilder::start`].
    pub fn restart_all(&self) -> Result<()> {
        self.members.iter().try_for_each(EtcdServer::kill)?;
        self.launch_all()?;
        self.wait_leader(LEADER_LIMIT).map(drop)
    }
}
