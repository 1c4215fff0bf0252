//! The clients of object stores, and their credentials.

use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};

use super::endpoint::{self, Settings};
use super::http::{Connector, OF_AZURE, OF_THOUSAND};
use super::profile;
use crate::location::{Location, LocationError, Scheme};

/// Hosts from which a machine gets the credentials of its role.
pub(super) const ROLES: [&str; 3] = [
    "metadata.google.internal",
    "169.254.169.254",
    "169.254.170.2",
];

/// The remedy for missing or wrong credentials of a kind of store.
pub(super) fn credentials(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::Gs => {
            "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account's key, or give the instance a service \
             account, that may read, write, list and delete objects below the prefix"
        }
        Scheme::Az => {
            "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY (base64) or an identity of the instance, that \
             may read, write, list and delete blobs below the prefix"
        }
        _ => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the pod or the instance a role, \
             that may read, write, list and delete objects below the prefix; set AWS_REGION"
        }
    }
}

/// The remedy if a store cannot be reached.
pub(super) fn reach(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::Gs => "check the bucket in the URL, and the way to storage.googleapis.com",
        Scheme::Az => {
            "check the container in the URL, AZURE_STORAGE_ACCOUNT_NAME, and the way to that account's blob service"
        }
        _ => {
            "check the bucket in the URL, AWS_REGION, and the address in AWS_ENDPOINT_URL (without it, Amazon's)"
        }
    }
}

/// Codes of a store that considers a request's time too old or too new, and the remedy.
pub(super) const CLOCK_WORDS: [&str; 2] = ["RequestTimeTooSkewed", "RequestExpired"];
pub(super) const CLOCK: &str =
    "set this machine's clock by NTP: the store refuses requests of another time";

const ALLOWS_HTTP: ClientConfigKey = ClientConfigKey::AllowHttp;
const ALLOWS_ANY: ClientConfigKey = ClientConfigKey::AllowInvalidCertificates;

/// The client of a store.
pub(super) struct StoreClient {
    pub(super) name: &'static str,
    pub(super) store: Arc<dyn ObjectStore>,
    /// Why others on the network may read what is sent.
    pub(super) exposure: Option<String>,
}

/// The client of a store. All settings but the bucket come from the environment, files, or the machine's role.
pub(super) fn client(location: &Location) -> std::result::Result<StoreClient, LocationError> {
    match location.scheme {
        Scheme::Gs => google(location),
        Scheme::Az => azure(location),
        _ => amazon(location),
    }
}

fn google(location: &Location) -> std::result::Result<StoreClient, LocationError> {
    let builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(&location.host)
        .with_http_connector(Connector(OF_THOUSAND))
        .with_retry(no_retry());
    let of = |key| builder.get_config_value(&key);
    let settings = Settings {
        addresses: &[("GOOGLE_BASE_URL", of(GoogleConfigKey::BaseUrl))],
        allows_http: of(GoogleConfigKey::Client(ALLOWS_HTTP)),
        allows_any_certificate: of(GoogleConfigKey::Client(ALLOWS_ANY)),
    };
    let exposure = exposure(location, "GOOGLE", settings)?;
    StoreClient::of("gs", location, builder.build(), exposure)
}

fn azure(location: &Location) -> std::result::Result<StoreClient, LocationError> {
    let builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(&location.host)
        .with_http_connector(Connector(OF_AZURE))
        .with_retry(no_retry());
    let of = |key| builder.get_config_value(&key);
    let settings = Settings {
        addresses: &[("AZURE_STORAGE_ENDPOINT", of(AzureConfigKey::Endpoint))],
        allows_http: of(AzureConfigKey::Client(ALLOWS_HTTP)),
        allows_any_certificate: of(AzureConfigKey::Client(ALLOWS_ANY)),
    };
    let exposure = exposure(location, "AZURE", settings)?;
    StoreClient::of("az", location, builder.build(), exposure)
}

fn amazon(location: &Location) -> std::result::Result<StoreClient, LocationError> {
    let builder = profile::complete(AmazonS3Builder::from_env())
        .with_bucket_name(&location.host)
        .with_unsigned_payload(true)
        .with_http_connector(Connector(OF_THOUSAND))
        .with_retry(no_retry());
    let of = |key| builder.get_config_value(&key);
    let settings = Settings {
        addresses: &[
            ("AWS_ENDPOINT_URL", of(AmazonS3ConfigKey::Endpoint)),
            ("AWS_ENDPOINT_URL_S3", of(AmazonS3ConfigKey::S3Endpoint)),
        ],
        allows_http: of(AmazonS3ConfigKey::Client(ALLOWS_HTTP)),
        allows_any_certificate: of(AmazonS3ConfigKey::Client(ALLOWS_ANY)),
    };
    let exposure = exposure(location, "AWS", settings)?;
    StoreClient::of("s3", location, builder.build(), exposure)
}

impl StoreClient {
    fn of(
        name: &'static str,
        location: &Location,
        built: object_store::Result<impl ObjectStore>,
        exposure: Option<String>,
    ) -> std::result::Result<Self, LocationError> {
        let store = built.map_err(|error| {
            let remedy = credentials(location.scheme);
            location.refused(format_args!("{error}; {remedy}"))
        })?;
        Ok(Self {
            name,
            store: Arc::new(store),
            exposure,
        })
    }
}

fn exposure(
    location: &Location,
    prefix: &str,
    settings: Settings<'_>,
) -> std::result::Result<Option<String>, LocationError> {
    endpoint::check(prefix, settings).map_err(|error| location.refused(error))
}

/// This module has its own limits.
fn no_retry() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}
