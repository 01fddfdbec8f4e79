//! Leases: what decides about renewals, what keeps them, what heals and what must not.

mod healing;
mod keeper;
mod loss;
mod renewal;
mod self_healing;
mod session;
mod word;

pub use healing::{Lease, LeaseEvent};
pub(crate) use healing::{Owner, Presence, Sighting};
pub use loss::{Loss, LossReason};
pub(crate) use self_healing::callback;
pub use self_healing::{LeaseListener, SelfHealingBuilder, SelfHealingKeepAlive};
pub(crate) use session::{Session, SessionKey, SessionPool, Tenant, Ticket};
