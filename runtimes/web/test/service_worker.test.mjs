/** The service worker against a host, a browser's caches and pages that are made here: which version a page gets, whatever is cut. */

import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import vm from 'node:vm';

const CODE = readFileSync(new URL('../page/service-worker.js', import.meta.url), 'utf8');
const SCOPE = 'https://host/a/';
const LARGE = 'ort/large.wasm';
const TYPES = { html: 'text/html', mjs: 'text/javascript', json: 'application/json', wasm: 'application/wasm' };

const HEADERS = {
  'cross-origin-opener-policy': 'same-origin',
  'cross-origin-embedder-policy': 'require-corp',
  'cache-control': 'no-cache', // a browser that takes what another page got would mix versions
};

/** @param {string} text */
const sha256 = (text) => createHash('sha256').update(text).digest('hex');

/** The files of a version, with the `site.json` that `caracal web` gives them. @param {string} version */
function siteOf(version) {
  /** @type {Record<string, string>} */
  const files = { 'lib/same.mjs': 'the same in all', [LARGE]: 'the same in all' };
  for (const name of ['index.html', 'page/page.mjs', 'lib/model.mjs']) files[name] = `${name} of ${version}`;
  const hashes = Object.fromEntries(Object.entries(files).map(([name, text]) => [name, sha256(text)]));
  const site = { format: 'caracal-web-site', version: sha256(JSON.stringify(hashes)), files: hashes };
  return { ...files, 'site.json': JSON.stringify(site) };
}

/** A browser with one service worker, and the host that it talks to. */
class Browser {
  /** @type {Map<string, Map<string, Response>>} */
  stored = new Map();
  /** @type {string[]} */
  asked = [];
  /** @type {(path: string, files: Record<string, string>) => Response} */
  host = (path, files) => answer(path, files);
  /** @type {Record<string, string>} */
  files = {};
  /** @type {{id: string}[]} */
  pages = [];
  next = 1;

  constructor() {
    this.start();
  }

  /** Starts the service worker, as a browser does again and again. */
  start() {
    /** @type {Record<string, (event: any) => void>} */
    this.listeners = {};
    const clients = { matchAll: async () => this.pages, claim: async () => undefined };
    const self = {
      registration: { scope: SCOPE },
      location: new URL(SCOPE),
      clients,
      skipWaiting: () => undefined,
      addEventListener: (/** @type {string} */ type, /** @type {any} */ listener) => (this.listeners[type] = listener),
    };
    const caches = {
      open: async (/** @type {string} */ name) => {
        if (!this.stored.has(name)) this.stored.set(name, new Map());
        const store = /** @type {Map<string, Response>} */ (this.stored.get(name));
        return {
          match: async (/** @type {string} */ url) => store.get(url)?.clone(),
          put: async (/** @type {string} */ url, /** @type {Response} */ response) => void store.set(url, response),
          keys: async () => [...store.keys()].map((url) => ({ url })),
        };
      },
      keys: async () => [...this.stored.keys()],
      delete: async (/** @type {string} */ name) => this.stored.delete(name),
    };
    const fetch = async (/** @type {any} */ request) => {
      const path = (request.url ?? request).slice(SCOPE.length);
      this.asked.push(path);
      return this.host(path || 'index.html', this.files);
    };
    vm.runInNewContext(CODE, { self, caches, fetch, Response, Headers, URL, AbortSignal, Uint8Array, crypto });
  }

  /** @param {any} event */
  async #dispatch(type, event) {
    /** @type {Promise<any>[]} */
    const waiting = [];
    let answered;
    this.listeners[type]({
      waitUntil: (/** @type {Promise<any>} */ work) => waiting.push(work),
      respondWith: (/** @type {Promise<Response>} */ work) => (answered = work),
      ...event,
    });
    const response = await Promise.resolve(answered).catch(() => undefined);
    while (waiting.length) await waiting.shift();
    return response;
  }

  /** @param {string} path @param {object} more */
  async get(path, more = {}) {
    const request = {
      url: SCOPE + path,
      method: 'GET',
      mode: 'cors',
      destination: '',
      headers: new Headers(),
      ...more,
    };
    const { clientId = '', resultingClientId = '' } = /** @type {any} */ (more);
    const response = await this.#dispatch('fetch', { request, clientId, resultingClientId });
    if (!response || response.type === 'error') return undefined;
    for (const [name, value] of Object.entries(HEADERS)) assert.equal(response.headers.get(name), value);
    return response.text();
  }

  /** Loads the page: its text and those of its modules; undefined for what fails. */
  async visit() {
    const page = { id: `page-${this.next++}` };
    const index = await this.get('', { mode: 'navigate', resultingClientId: page.id });
    this.pages.push(page);
    return { page, texts: [index, ...(await this.load(page, 'page/page.mjs', 'lib/model.mjs', 'lib/same.mjs'))] };
  }

  /** @param {{id: string}} page @param {string[]} paths */
  async load(page, ...paths) {
    const texts = [];
    for (const path of paths) texts.push(await this.get(path, { clientId: page.id }));
    return texts;
  }

  /** @param {{id: string}} page */
  close(page) {
    this.pages = this.pages.filter((one) => one !== page);
  }
}

/** @param {string} path @param {Record<string, string>} files @returns {Response} */
function answer(path, files, status = path in files ? 200 : 404, type = TYPES[path.split('.').pop()]) {
  const response = new Response(files[path] ?? 'not found', { status, headers: { 'content-type': type } });
  return Object.defineProperty(response, 'type', { value: 'basic' }); // as if it came over a network
}

const cut = () => {
  throw new TypeError('Failed to fetch');
};
const portal = () => answer('index.html', { 'index.html': 'Log in first' });
const broken = (path) => answer(path, {}, 503, 'text/html');

/** What a page of a version has. @param {string} version */
const pageOf = (version) =>
  ['index.html', 'page/page.mjs', 'lib/model.mjs', 'lib/same.mjs'].map((path) => siteOf(version)[path]);

test('a page that was there once is there without a network, and asks for nothing twice', async () => {
  const browser = new Browser();
  browser.files = siteOf('A');
  const { page, texts } = await browser.visit();
  assert.deepEqual(texts, pageOf('A'));
  await browser.load(page, LARGE);
  browser.asked = [];
  browser.start();
  assert.deepEqual((await browser.visit()).texts, pageOf('A'));
  assert.deepEqual(browser.asked, ['site.json']);
  for (const host of [cut, portal, broken]) {
    browser.host = host;
    browser.start();
    const { page, texts } = await browser.visit();
    assert.deepEqual(texts, pageOf('A'));
    assert.deepEqual(await browser.load(page, LARGE), ['the same in all']);
  }
});

for (const [name, failing] of Object.entries({ cut, portal, broken })) {
  for (const path of ['site.json', 'index.html', 'page/page.mjs', 'lib/model.mjs']) {
    test(`a visit that ends at ${path} (${name}) leaves the version before whole`, async () => {
      const browser = new Browser();
      browser.files = siteOf('A');
      const first = await browser.visit();
      browser.close(first.page);
      browser.files = siteOf('B');
      browser.host = (asked, files) => (asked === path ? failing(asked) : answer(asked, files));
      const second = await browser.visit();
      const versions = second.texts.map(
        (text, at) => text && ['A', 'B'].filter((one) => pageOf(one)[at] === text).join(),
      );
      assert.ok(!versions.includes('A') || !versions.includes('B'), versions.join()); // no mix, and whatever fails shows
      browser.close(second.page);
      browser.host = cut;
      browser.start();
      assert.deepEqual((await browser.visit()).texts, pageOf('A'));
      browser.host = answer;
      assert.deepEqual((await browser.visit()).texts, pageOf('B'));
      browser.host = cut;
      assert.deepEqual((await browser.visit()).texts, pageOf('B'));
    });
  }
}

test('a page keeps its version while a newer one is opened beside it, and old ones go when nobody has them', async () => {
  const browser = new Browser();
  browser.files = siteOf('A');
  const old = await browser.visit();
  await browser.load(old.page, LARGE);
  browser.files = siteOf('B');
  browser.asked = [];
  const recent = await browser.visit();
  assert.deepEqual(recent.texts, pageOf('B'));
  assert.ok(!browser.asked.includes(LARGE) && !browser.asked.includes('lib/same.mjs')); // the same in both
  browser.start();
  assert.deepEqual(await browser.load(old.page, 'lib/model.mjs', LARGE), [
    siteOf('A')['lib/model.mjs'],
    'the same in all',
  ]);
  assert.deepEqual(await browser.load(recent.page, 'lib/model.mjs'), [siteOf('B')['lib/model.mjs']]);
  browser.close(old.page);
  const state = /** @type {any} */ (browser.stored.get('caracal-page /a/ state'));
  const known = await state.get(`${SCOPE}state.json`).clone().json();
  for (const pin of Object.values(known.pins)) pin.time -= 3600e3;
  state.set(`${SCOPE}state.json`, Response.json(known));
  browser.stored.set('caracal-page /a/ 1', new Map()); // what an earlier service worker kept
  browser.stored.set('caracal-page /a/b/ state', new Map()); // another page of this host
  browser.stored.set('caracal-bundles', new Map());
  browser.start();
  await browser.visit();
  const { version } = JSON.parse(siteOf('B')['site.json']);
  assert.deepEqual([...browser.stored.keys()].sort(), [
    'caracal-bundles',
    `caracal-page /a/ ${version}`,
    'caracal-page /a/ state',
    'caracal-page /a/b/ state',
  ]);
});

test('a host that alters files serves the page, which is then not kept', async () => {
  const browser = new Browser();
  browser.files = { ...siteOf('A'), 'page/page.mjs': 'altered' };
  assert.deepEqual((await browser.visit()).texts, pageOf('A').with(1, 'altered'));
  browser.host = cut;
  assert.ok((await browser.visit()).texts.includes(undefined));
});

test('without site.json each file is the last that came and was what its name says', async () => {
  const browser = new Browser();
  const { 'site.json': _, ...files } = siteOf('A');
  browser.files = files;
  assert.deepEqual((await browser.visit()).texts, pageOf('A'));
  browser.host = (path, given) => (path === 'lib/model.mjs' ? portal() : answer(path, given));
  assert.equal((await browser.visit()).texts[2], 'Log in first'); // as the network gives it
  for (const host of [cut, broken]) {
    browser.host = host;
    browser.start();
    assert.deepEqual((await browser.visit()).texts, pageOf('A'));
  }
});

test("a bundle's files are not its business", async () => {
  const browser = new Browser();
  for (const path of ['bundle/manifest.json', 'bundle/weights.safetensors', 'site.json'])
    assert.equal(await browser.get(path), undefined);
  assert.deepEqual(browser.asked, []);
});
