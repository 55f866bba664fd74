// Two jobs: it adds the headers that make the page cross-origin isolated, for hosts where headers cannot be set, and it
// keeps the page's own files, so that the page loads when there is no network. Bundles are the library's business.
//
// The host's site.json names the version of the page and the sha256 of each of its files. An open page has one version
// from its first file to its last: each has a cache of its own, and only files with the version's hashes get there.
// Without a network the page is the newest version that is whole, or an error, and never a mix. A host without site.json
// gets no such promise: each file is the network's, or else the last one that the network gave.

const worker = /** @type {any} */ (self);
/** @type {string} */
const SCOPE = worker.registration.scope;
// Storage belongs to the host, where other copies of this page may lie in other folders.
const CACHE_FAMILY = `caracal-page ${new URL(SCOPE).pathname} `;
const STATE_CACHE = `${CACHE_FAMILY}state`;
const STATE_KEY = `${SCOPE}state.json`;
const INDEX = 'index.html';
const VERSION_FILE = 'site.json';
const KEPT_FOLDERS = ['page/', 'lib/', 'ort/', 'tokenizers/'];
const KEPT_FILES = ['', INDEX];
const USED_FOLDERS = ['ort/', 'tokenizers/']; // large, and no page needs all of them: kept once they were asked for
const NO_BODY = [101, 204, 205, 304];
const PATIENCE_MS = 4000;
const YOUNG_MS = 60000; // a page that is being loaded is not on the browser's list yet

// Instead of a version, for a page whose host has none, or of which nothing is known.
const PLAIN = 'plain';
const UNKNOWN = 'unknown';

/** What a file must be sent as, by the end of its name; an answer for all that a network asks to log in is HTML. */
const TYPES = [
  [/\.m?js$/, /^(?:text|application)\/(?:x-)?(?:java|ecma)script\b/],
  [/\.wasm$/, /^application\/(?:wasm|octet-stream)\b/],
  [/\.css$/, /^text\/css\b/],
  [/\.json$/, /^(?:application|text)\/json\b/],
  [/\.svg$/, /^image\/svg\+xml\b/],
  [/\.html$|^$/, /^text\/html\b/],
  [/./, /^(?!text\/html\b)/],
];

/**
 * @typedef {{version: string, files: Record<string, string>}} Site `files`: sha256 by path
 * @typedef {{version: string, time: number}} Pin the version of one client, that is an open page or a worker
 * @typedef {{whole: string | null, last: string | null, pins: Record<string, Pin>}} State `whole`: the newest version of
 *   which all is kept; `last`: the version of the page that was opened last
 */

worker.addEventListener('install', () => worker.skipWaiting());

worker.addEventListener('activate', (/** @type {any} */ event) => {
  event.waitUntil(worker.clients.claim());
});

worker.addEventListener('message', (/** @type {any} */ event) => {
  if (event.data?.type === 'claim') event.waitUntil(worker.clients.claim());
  if (event.data?.type === 'keep') event.waitUntil(keepAll(event.source?.id ?? '', event.data.urls));
});

worker.addEventListener('fetch', (/** @type {any} */ event) => {
  const { request } = event;
  if (new URL(request.url).origin !== worker.location.origin) return;
  const path = keptPath(request.url);
  if (request.method === 'GET' && path !== null && !request.headers.has('range')) {
    event.respondWith(answer(event, path));
  } else if (
    request.mode === 'navigate' ||
    ['script', 'worker', 'sharedworker', 'iframe'].includes(request.destination)
  ) {
    event.respondWith(fetch(request).then(isolated));
  }
});

/** The path below the page's folder if the file is one of the page's own, else null. @param {string} url */
function keptPath(url) {
  const plain = plainUrl(url);
  if (!plain.startsWith(SCOPE)) return null;
  const path = plain.slice(SCOPE.length);
  return KEPT_FILES.includes(path) || KEPT_FOLDERS.some((folder) => path.startsWith(folder)) ? path : null;
}

/**
 * @param {any} event
 * @param {string} path
 * @returns {Promise<Response>}
 */
async function answer(event, path) {
  const { request, clientId, resultingClientId } = event;
  const navigates = request.mode === 'navigate';
  const version = navigates ? await versionNow() : await versionOf(clientId);
  if (resultingClientId) event.waitUntil(pin(resultingClientId, version, navigates));
  const site = await siteOf(version);
  if (site === null) return networkFirst(event, version);
  if (navigates) event.waitUntil(fill(site).then(deleteOldCaches));
  const name = path || INDEX;
  return name in site.files ? fileOf(site, name) : isolated(await fetch(request));
}

// Versions

/** @type {Promise<State> | null} */
let state = null;
/** @type {Map<string, Site>} */
const sites = new Map();
/** What is being found out about a client. @type {Map<string, Promise<string>>} */
const deciding = new Map();

/** What is remembered: a browser ends a service worker whenever it has nothing to do. @returns {Promise<State>} */
function remembered() {
  state ??= (async () => {
    const kept = await (await caches.open(STATE_CACHE)).match(STATE_KEY);
    return kept ? kept.json() : { whole: null, last: null, pins: {} };
  })().catch(() => ({ whole: null, last: null, pins: {} }));
  return state;
}

async function remember() {
  try {
    await (await caches.open(STATE_CACHE)).put(STATE_KEY, Response.json(await remembered()));
  } catch {
    // No room: it is asked for again.
  }
}

/** @param {string} clientId @param {string} version @param {boolean} opens whether it is a page that is opened */
async function pin(clientId, version, opens) {
  const known = await remembered();
  known.pins[clientId] = { version, time: Date.now() };
  if (opens) known.last = version;
  await remember();
}

/** The version of an open page or a worker. @param {string} clientId */
async function versionOf(clientId) {
  const { pins, last } = await remembered();
  if (pins[clientId]) return pins[clientId].version;
  const windows = await worker.clients.matchAll({ type: 'window', includeUncontrolled: true });
  const isPage = windows.some((/** @type {any} */ client) => client.id === clientId);
  if (!isPage && last !== null) return last; // a worker: it has no name of its own for its page
  let version = deciding.get(clientId);
  if (version === undefined) {
    // A page that was loaded without this service worker, a moment ago.
    version = versionNow().then(async (found) => {
      await pin(clientId, found, isPage);
      return found;
    });
    deciding.set(clientId, version);
    version.finally(() => deciding.delete(clientId)).catch(() => undefined);
  }
  return version;
}

/** The version that a page opened now should have: the host's, or where that cannot be known the one that is kept. */
async function versionNow() {
  const known = await remembered();
  const found = await askHost(known.whole !== null);
  if (found === PLAIN) known.whole = null;
  if (found === UNKNOWN) return known.whole ?? UNKNOWN;
  return found;
}

/** The host's version, PLAIN where it has none, UNKNOWN where no answer comes. @param {boolean} hurry */
async function askHost(hurry) {
  try {
    const signal = hurry ? AbortSignal.timeout(PATIENCE_MS) : undefined;
    // Not even compared with a copy: hosts compare times, and a version may be put there with an older one's.
    const response = await fetch(SCOPE + VERSION_FILE, { cache: 'no-store', signal });
    if (response.status === 404 || response.status === 410) return PLAIN;
    if (!isRight(VERSION_FILE, response)) return UNKNOWN;
    const site = readSite(await response.json());
    if (site === null) return UNKNOWN;
    sites.set(site.version, site);
    return site.version;
  } catch {
    return UNKNOWN;
  }
}

/** @param {any} data @returns {Site | null} */
function readSite(data) {
  const isHash = (/** @type {unknown} */ value) => typeof value === 'string' && /^[0-9a-f]{64}$/.test(value);
  const { format, version, files } = data ?? {};
  const good = format === 'caracal-web-site' && isHash(version) && files && Object.values(files).every(isHash);
  return good && INDEX in files ? { version, files } : null;
}

/** The files of a version; null where there is none. @param {string} version @returns {Promise<Site | null>} */
async function siteOf(version) {
  if (version === PLAIN || version === UNKNOWN) return null;
  const known = sites.get(version);
  if (known) return known;
  const kept = await (await cacheOf(version)).match(SCOPE + VERSION_FILE);
  const site = kept ? readSite(await kept.json()) : null;
  if (site !== null) sites.set(version, site);
  return site;
}

/** @param {string} version */
function cacheOf(version) {
  return caches.open(CACHE_FAMILY + version);
}

// Files of one version

/** What is being fetched, for all who ask for it. @type {Map<string, Promise<{response: Response, right: boolean}>>} */
const underway = new Map();
/** @type {Map<string, Promise<void>>} */
const filling = new Map();

/** A file of a version, kept from then on. @param {Site} site @param {string} path @returns {Promise<Response>} */
async function fileOf(site, path) {
  const kept = await (await cacheOf(site.version)).match(SCOPE + path);
  if (kept) return kept;
  const { response, right } = await obtain(site, path);
  // The host has another version by now, whose files do not fit the page. Where nothing is whole yet, it may also be a
  // host that alters files; then the page works as it comes, and is not kept.
  if (!right && (await remembered()).whole === site.version) return Response.error();
  return response.clone();
}

/** @param {Site} site @param {string} path */
function obtain(site, path) {
  const key = `${site.version} ${path}`;
  let file = underway.get(key);
  if (file === undefined) {
    file = download(site, path).finally(() => underway.delete(key));
    underway.set(key, file);
  }
  return file;
}

/**
 * @param {Site} site
 * @param {string} path
 * @returns {Promise<{response: Response, right: boolean}>} `right`: it has the version's hash, and is kept if there is room
 */
async function download(site, path) {
  const same = await sameFile(site, path);
  if (same) return { response: await put(site, path, same), right: true };
  let found = null;
  // What the browser's own cache takes for fresh may be older than the version.
  for (const cache of /** @type {RequestCache[]} */ (['no-cache', 'reload'])) {
    const response = await fetch(SCOPE + (path === INDEX ? '' : path), { cache }); // some hosts redirect from index.html
    if (!isRight(path, response)) return { response: isolated(response), right: false };
    const bytes = await response.arrayBuffer();
    const { status, statusText } = response;
    const headers = new Headers(response.headers);
    for (const name of ['content-encoding', 'content-length']) headers.delete(name); // of what was on the wire
    found = isolated(new Response(bytes, { status, statusText, headers }));
    if ((await sha256(bytes)) === site.files[path]) return { response: await put(site, path, found), right: true };
  }
  return { response: /** @type {Response} */ (found), right: false };
}

/** The file as the version before has it, if it is the same in both. @param {Site} site @param {string} path */
async function sameFile(site, path) {
  const { whole } = await remembered();
  if (whole === null || whole === site.version) return undefined;
  const before = await siteOf(whole);
  return before?.files[path] === site.files[path] ? (await cacheOf(whole)).match(SCOPE + path) : undefined;
}

/** @param {Site} site @param {string} path @param {Response} response */
async function put(site, path, response) {
  try {
    await (await cacheOf(site.version)).put(SCOPE + path, response.clone());
  } catch {
    // No room: the page works, and is not whole without a network.
  }
  return response;
}

/** Fetches what is lacking of a version; when it is whole, it is the one for when there is no network. @param {Site} site */
function fill(site) {
  let work = filling.get(site.version);
  if (work === undefined) {
    work = fillNow(site)
      .catch(() => undefined) // the network is cut; the next visit tries again
      .finally(() => filling.delete(site.version));
    filling.set(site.version, work);
  }
  return work;
}

/** @param {Site} site */
async function fillNow(site) {
  const known = await remembered();
  const cache = await cacheOf(site.version);
  if (known.whole === site.version && (await cache.match(SCOPE + VERSION_FILE))) return;
  const { version, files } = site;
  await cache.put(SCOPE + VERSION_FILE, Response.json({ format: 'caracal-web-site', version, files }));
  const used = known.whole === null ? [] : await keptPaths(known.whole);
  const isUsed = (/** @type {string} */ path) => USED_FOLDERS.some((folder) => path.startsWith(folder));
  const wanted = Object.keys(files).filter((path) => !isUsed(path) || used.includes(path));
  await Promise.all(wanted.map(async (path) => (await cache.match(SCOPE + path)) || obtain(site, path)));
  const kept = await keptPaths(version);
  if (!wanted.every((path) => kept.includes(path))) return;
  known.whole = version;
  await remember();
}

/** @param {string} version */
async function keptPaths(version) {
  return (await (await cacheOf(version)).keys()).map(({ url }) => url.slice(SCOPE.length));
}

/** Deletes the versions that are neither whole and newest nor open. */
async function deleteOldCaches() {
  const known = await remembered();
  const open = await worker.clients.matchAll({ type: 'all', includeUncontrolled: true });
  const ids = new Set(open.map((/** @type {any} */ client) => client.id));
  const isOpen = (/** @type {[string, Pin]} */ [id, { time }]) => ids.has(id) || Date.now() - time < YOUNG_MS;
  known.pins = Object.fromEntries(Object.entries(known.pins).filter(isOpen));
  await remember();
  const versions = [known.whole, ...Object.values(known.pins).map(({ version }) => version)];
  const needed = [STATE_CACHE, ...versions.map((version) => CACHE_FAMILY + version)];
  const names = await caches.keys();
  const old = names.filter((name) => name.startsWith(CACHE_FAMILY) && !needed.includes(name));
  await Promise.all(old.map((name) => caches.delete(name)));
}

// Files of a host without versions

/** @param {any} event @param {string} version @returns {Promise<Response>} */
async function networkFirst(event, version) {
  const { request } = event;
  let response;
  try {
    response = await fetch(request);
  } catch (error) {
    const kept = await find(request.url);
    if (kept) return kept;
    throw error;
  }
  // A host in trouble is as good as no network; that a file is missing is an answer.
  if (response.status >= 500) return (await find(request.url)) ?? isolated(response);
  const given = isolated(response);
  if (version === PLAIN && isRight(keptPath(request.url) ?? '', response))
    event.waitUntil(keep(request.url, given.clone()));
  return given;
}

/** @param {string} url */
async function find(url) {
  const kept = await (await cacheOf(PLAIN)).match(plainUrl(url));
  return kept && isolated(kept);
}

/**
 * Writes a response to the cache, unless the copy there is the same by its validator: WebAssembly files are large.
 * @param {string} url
 * @param {Response} response
 */
async function keep(url, response) {
  try {
    const cache = await cacheOf(PLAIN);
    const old = await cache.match(plainUrl(url));
    if (old && validator(old) !== null && validator(old) === validator(response)) {
      await response.body?.cancel();
      return;
    }
    await cache.put(plainUrl(url), response);
  } catch {
    // No room, or the network was cut on the way: the old copy stays.
  }
}

/** Keeps what a page loaded before this service worker could see it. @param {string} clientId @param {string[]} urls */
async function keepAll(clientId, urls) {
  const version = await versionOf(clientId);
  const site = await siteOf(version);
  if (site !== null) await fill(site);
  if (version !== UNKNOWN) await deleteOldCaches();
  if (version !== PLAIN) return;
  for (const url of urls) {
    const path = keptPath(url);
    if (path === null || (await find(url))) continue;
    try {
      const response = await fetch(url);
      if (isRight(path, response)) await keep(url, isolated(response));
    } catch {
      return; // the network is cut; the next visit tries again
    }
  }
}

/** @param {Response} response */
function validator({ headers }) {
  return (
    headers.get('etag') ??
    (headers.has('last-modified') ? `${headers.get('last-modified')} ${headers.get('content-length')}` : null)
  );
}

// Answers

/** Whether an answer is the file itself, as far as its head tells. @param {string} path @param {Response} response */
function isRight(path, response) {
  if (response.status !== 200 || response.type !== 'basic' || response.redirected) return false;
  const [, type] = /** @type {RegExp[]} */ (TYPES.find(([name]) => name.test(path)));
  return type.test((response.headers.get('content-type') ?? '').toLowerCase());
}

/** The response with the headers of an isolated page, to be asked for each time. @param {Response} response */
function isolated(response) {
  if (response.type === 'opaque' || response.type === 'opaqueredirect' || response.status === 0) return response;
  const headers = new Headers(response.headers);
  headers.set('Cross-Origin-Opener-Policy', 'same-origin');
  headers.set('Cross-Origin-Embedder-Policy', 'require-corp');
  headers.set('Cross-Origin-Resource-Policy', 'same-origin');
  // Else a browser takes what another page got, which may be of another version, and does not ask here.
  headers.set('Cache-Control', 'no-cache');
  const body = NO_BODY.includes(response.status) ? null : response.body;
  return new Response(body, { status: response.status, statusText: response.statusText, headers });
}

/** @param {ArrayBuffer} bytes */
async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

/** @param {string} url */
function plainUrl(url) {
  return url.split(/[?#]/)[0];
}
