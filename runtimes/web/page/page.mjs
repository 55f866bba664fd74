/** Puts the page together. */

import { Client } from './client.mjs';
import { byId } from './dom.mjs';
import { setUpServiceWorker } from './isolation.mjs';
import { OpenPanel } from './open_panel.mjs';
import { ParityPanel } from './parity_panel.mjs';
import { Plot } from './plot.mjs';
import { Shell } from './shell.mjs';
import { setUpTheme } from './theme.mjs';
import { WritePanel } from './write_panel.mjs';

const shell = new Shell();
const client = new Client((failure) => {
  shell.enter('failed', 'The bundle is no longer open');
  shell.fail(failure);
});
const plot = new Plot(byId('plot'), byId('plot-summary'));
const write = new WritePanel(client, shell, plot);
const parity = new ParityPanel(client, shell);
const open = new OpenPanel(client, shell, [write, parity]);

setUpTheme(byId('theme'), () => plot.draw());
shell.enter('idle', 'Looking for a bundle');

// The GPU is looked for while the rest goes on: some drivers take seconds.
const gpu = open.findGpu();
if (await setUpServiceWorker()) await open.openServed();
await gpu;
