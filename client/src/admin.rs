//! Administration, over a connection of its own.

use crate::connection::{Connection, Done};
use crate::control::{DeadMessage, QueueInfo, Redriven, Request, Stats};
use crate::error::Result;
use crate::settings::QueueSettings;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// See the module.
#[derive(Debug)]
pub(crate) struct Admin {
    socket: PathBuf,
    connection: Connection,
}

impl Admin {
    pub(crate) fn connect(socket: &Path) -> Result<Admin> {
        Ok(Admin {
            socket: socket.to_owned(),
            connection: Connection::greeted(socket)?.0,
        })
    }

    pub(crate) fn create_queue(&mut self, name: &str, settings: &QueueSettings) -> Result<()> {
        let (name, settings) = (name.to_owned(), settings.clone());
        let _: Done = self.call(&Request::QueueCreate { name, settings })?;
        Ok(())
    }

    pub(crate) fn delete_queue(&mut self, name: &str) -> Result<()> {
        let name = name.to_owned();
        let _: Done = self.call(&Request::QueueDelete { name })?;
        Ok(())
    }

    pub(crate) fn queues(&mut self) -> Result<Vec<QueueInfo>> {
        self.call(&Request::QueueList)
    }

    pub(crate) fn queue(&mut self, name: &str) -> Result<QueueInfo> {
        let name = name.to_owned();
        self.call(&Request::QueueInfo { name })
    }

    pub(crate) fn stats(&mut self) -> Result<Stats> {
        self.call(&Request::Stats)
    }

    pub(crate) fn dead_letters(
        &mut self,
        queue: &str,
        from: u64,
        limit: u32,
    ) -> Result<Vec<DeadMessage>> {
        let queue = queue.to_owned();
        self.call(&Request::DeadLetters { queue, from, limit })
    }

    pub(crate) fn redrive(&mut self, queue: &str, to: Option<&str>, limit: u64) -> Result<u64> {
        let (queue, to) = (queue.to_owned(), to.map(str::to_owned));
        let limit = Some(limit);
        let redriven: Redriven = self.call(&Request::Redrive { queue, to, limit })?;
        Ok(redriven.moved)
    }

    /// Asks. A connection whose broker has ended since the last call is made
    /// anew, once; one that ends during the call is an error, since the broker
    /// may have done what was asked.
    fn call<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T> {
        if self.connection.is_at_end() {
            self.connection = Connection::greeted(&self.socket)?.0;
        }
        self.connection.call(request)
    }
}
