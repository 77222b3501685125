"use strict";
// Polls /status.json and shows it. Text from the server becomes text nodes only: ids of samplers
// come from machines that nobody of the run may have seen.

const POLL_MS = 1000, MAX_WAIT_MS = 15000, TIMEOUT_MS = 5000, STALE_MS = 6000;
const NUM_SPARK = 60, OPEN_UP_TO = 24, MAX_LOST = 10;
const STATES = ["ready", "draining", "lost"];

const $ = (id) => document.getElementById(id);
const num = (value) => (value === undefined ? null : Number(value)); // int64 comes as a string
const sum = (values) => values.reduce((total, value) => total + value, 0);

// Text.

const MISSING = "\u2013";
const byNumber = new Intl.Collator("en", { numeric: true }); // n-2 before n-10
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const count = (value) => (value === null || !isFinite(value) ? MISSING : whole.format(value));
const significant = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const digits = (value) => (value === null || !isFinite(value) ? MISSING : significant.format(value));
const fixed = (value, places) => (value === null || !isFinite(value) ? MISSING : value.toFixed(places));
const percent = (value, places = 1) =>
  value === null || !isFinite(value) ? MISSING : `${(100 * value).toFixed(places)}\u00a0%`;
const dollars = (value) =>
  value === null || !isFinite(value) ? MISSING : `$${value < 1000 ? value.toFixed(2) : whole.format(value)}`;
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

function compact(value) {
  if (value === null || !isFinite(value)) return MISSING;
  if (value < 10000) return whole.format(value);
  const [unit, scale] = value < 1e6 ? ["k", 1e3] : value < 1e9 ? ["M", 1e6] : ["G", 1e9];
  return `${(value / scale).toFixed(value / scale < 100 ? 1 : 0)}\u00a0${unit}`;
}

function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds / 3600) % 24} h`;
}

// Elements. Nothing is touched that stays as it is.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function mark(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function hide(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

// Children of `parent`, one per key and in this order; `make` is called for new keys only.
function keyed(parent, keys, make) {
  const known = (parent.known ??= new Map());
  const wanted = new Set(keys);
  for (const [key, child] of known) {
    if (!wanted.has(key)) {
      child.node.remove();
      known.delete(key);
    }
  }
  let at = parent.firstElementChild;
  return keys.map((key) => {
    if (!known.has(key)) known.set(key, make(key));
    const child = known.get(key);
    if (child.node === at) at = at.nextElementSibling;
    else parent.insertBefore(child.node, at);
    return child;
  });
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function makeSpark() {
  const node = svg("svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" });
  const area = svg("path", { class: "area" }), line = svg("path", { class: "line" });
  node.append(area, line);
  const values = [];
  return {
    node,
    forget: () => (values.length = 0),
    push(value) {
      values.push(value);
      if (values.length > NUM_SPARK) values.shift();
      const top = Math.max(...values) || 1, step = 100 / (NUM_SPARK - 1);
      const start = 100 - step * (values.length - 1);
      const points = values.map((v, i) => `${(start + i * step).toFixed(1)},${(19 - (18 * v) / top).toFixed(1)}`);
      line.setAttribute("d", "M" + points.join("L"));
      area.setAttribute("d", `M${start.toFixed(1)},20L${points.join("L")}L100,20Z`);
    },
  };
}

function makeBar(withDue) {
  const fill = element("i"), node = element("span", { class: "bar", "aria-hidden": "true" }, fill);
  const due = withDue ? node.appendChild(element("b")) : null;
  const place = (part, name, value) => {
    const text = `${(100 * Math.min(Math.max(value || 0, 0), 1)).toFixed(1)}%`;
    if (part.style[name] !== text) part.style[name] = text;
  };
  return { node, show: (value, wanted) => (place(fill, "width", value), due && place(due, "left", wanted)) };
}

function cell(label, ...children) {
  return element("td", { role: "cell", "data-label": label }, ...children);
}

// What the status means.

function summarize(status) {
  const groups = status.groups.map((group) => ({
    name: group.group, purpose: group.purpose, due: group.capacity_share,
    routed: num(group.sessions_routed), tokens: num(group.tokens_sampled), rate: num(group.tokens_per_second),
    kl: num(group.update?.kl), outOfBand: num(group.update?.share_out_of_band),
    gpuHours: num(group.cost?.gpu_hours), dollars: num(group.cost?.dollars),
    target: num(group.num_target), held: num(group.num_held), samplers: [],
  }));
  const byName = new Map(groups.map((group) => [group.name, group]));
  const update = status.update ?? null;
  let newest = num(update?.version) ?? 0;
  for (const sampler of status.samplers) {
    const info = sampler.register ?? {}, beat = sampler.heartbeat ?? {};
    const version = num(beat.version) ?? 0;
    if (sampler.state !== "lost") newest = Math.max(newest, version);
    byName.get(info.group)?.samplers.push({
      id: info.sampler_id, state: sampler.state, version, beat, info,
      sessions: sampler.num_sessions, switch: beat.switch ?? null,
    });
  }
  for (const group of groups) {
    group.samplers.sort((a, b) => (a.state === "lost") - (b.state === "lost")
      || byNumber.compare(a.id, b.id));
    group.count = Object.fromEntries(STATES.map((state) => [state, group.samplers.filter((s) => s.state === state).length]));
    group.sessions = sum(group.samplers.map((s) => s.sessions));
    const total = sum(groups.filter((g) => g.purpose === group.purpose).map((g) => g.routed));
    group.got = total ? group.routed / total : null;
  }
  const known = (field) => groups.map((group) => group[field]).filter((value) => value !== null);
  const total = (field) => (known(field).length ? sum(known(field)) : null);
  return {
    groups, newest, update,
    rate: sum(groups.map((group) => group.rate)),
    gpuHours: total("gpuHours"), dollars: total("dollars"),
    unpriced: groups.filter((group) => group.gpuHours !== null && group.dollars === null).map((group) => group.name),
    num: status.samplers.length,
  };
}

// What a reader sees.

const TILES = ["Newest version", "Updates", "Episodes in flight", "Groups waiting", "Staleness", "Tokens/s", "Cost so far", "Cost per update"];
const tiles = Object.fromEntries(TILES.map((title) => {
  const value = element("dd", {}, MISSING), also = element("dd", { class: "also" });
  $("tiles").append(element("div", { class: "tile" }, element("dt", {}, title), value, also));
  return [title, { show: (text, more = "") => (say(value, text), say(also, more)) }];
}));

function showTiles(status, fleet) {
  const { update } = fleet, step = num(update?.step) || null;
  const behind = fleet.groups.flatMap((g) => g.samplers).filter((s) => s.state !== "lost" && s.version < fleet.newest).length;
  tiles["Newest version"].show(count(fleet.newest || null), behind ? `${count(behind)} behind` : fleet.num ? "served by all" : "");
  tiles["Updates"].show(count(step ?? 0), update?.seconds ? `last: ${duration(num(update.seconds))}` : "");
  tiles["Episodes in flight"].show(count(status.episodes_in_flight), num(status.demand?.num_queued) ? `${count(num(status.demand.num_queued))} queued` : "");
  tiles["Groups waiting"].show(count(status.groups_ready), `newest ${count(num(status.last_sequence))}`);
  tiles["Staleness"].show(fixed(num(update?.staleness) ?? num(status.demand?.staleness), 2), "versions, mean");
  tiles["Tokens/s"].show(compact(fleet.rate), `${compact(sum(fleet.groups.map((g) => g.tokens)))} so far`);
  const hours = (value) => (value === null ? "" : `${digits(value)} GPU\u2011h`);
  tiles["Cost so far"].show(dollars(fleet.dollars), hours(fleet.gpuHours));
  const each = (value) => (value === null || !step ? null : value / step);
  tiles["Cost per update"].show(dollars(each(fleet.dollars)), hours(each(fleet.gpuHours)));

  const said = [];
  if (update) {
    said.push(`Update ${count(step)} made version ${count(num(update.version))}`);
    if (update.seconds) said.push(`${percent(update.update_seconds / update.seconds, 0)} of its time computing`);
    if (update.reward !== undefined) said.push(`reward ${fixed(num(update.reward), 3)}`);
    if (update.kl !== undefined) said.push(`KL ${digits(num(update.kl))}`);
    if (update.share_out_of_band !== undefined) said.push(`${percent(num(update.share_out_of_band), 2)} of its tokens out of band`);
  }
  else said.push("No update yet");
  if (fleet.unpriced.length) said.push(`dollars leave out ${fleet.unpriced.join(", ")}: no price`);
  say($("update"), said.join(" \u00b7 "));
}

function showAlarms(alarms) {
  if (!latest) $("alarms").replaceChildren();
  const rows = keyed($("alarms"), alarms.length ? [...new Set(alarms)] : [""], (text) => ({
    node: element("li", { class: text ? "alarm" : "calm sure" }, text || "No alarms"),
  }));
  say($("alarms-title"), rows[0].node.classList.contains("calm") ? "Alarms" : plural(rows.length, "alarm"));
}

function makeGroupRow() {
  const parts = {
    name: element("span"), about: element("small"), ready: element("span"), held: element("small"),
    got: element("span"), share: makeBar(true), due: element("span", { class: "with" }), sessions: element("span"), routed: element("small"),
    rate: element("span"), spark: makeSpark(), tokens: element("small"), kl: element("span"), out: element("span"),
    cost: element("span"), hours: element("small"),
  };
  const node = element("tr", { role: "row" },
    element("th", { role: "rowheader", scope: "row" }, parts.name, parts.about),
    cell("Ready / target", parts.ready, parts.held), cell("Share of sessions", parts.got, parts.due, parts.share.node),
    cell("Sessions", parts.sessions, parts.routed), cell("Tokens/s", parts.spark.node, parts.rate, parts.tokens),
    cell("KL", parts.kl), cell("Out of band", parts.out), cell("Cost", parts.cost, parts.hours));
  return { node, parts };
}

function showGroups(fleet) {
  const groups = fleet.groups;
  const widest = Math.max(...groups.flatMap((group) => [group.due, group.got ?? 0]), 1e-9);
  keyed($("groups").tBodies[0], groups.map((group) => group.name), makeGroupRow).forEach(({ parts }, i) => {
    const group = groups[i], info = group.samplers[0]?.info ?? {};
    say(parts.name, group.name);
    say(parts.about, [group.purpose, info.accelerator, info.weight_format].filter(Boolean).join(" \u00b7 "));
    say(parts.ready, group.target === null ? count(group.count.ready) : `${count(group.count.ready)} / ${count(group.target)}`);
    const short = Math.max(0, (group.target ?? 0) - group.count.ready);
    const held = group.held === null ? "" : `${count(group.held)} held`;
    say(parts.held, [short ? `${count(short)} short` : "", held].filter(Boolean).join(" \u00b7 "));
    mark(parts.held, "class", short ? "behind" : null);
    say(parts.got, percent(group.got));
    say(parts.due, ` of ${percent(group.due)} due`);
    parts.share.show((group.got ?? 0) / widest, group.due / widest);
    say(parts.sessions, count(group.sessions));
    say(parts.routed, `${compact(group.routed)} ever`);
    say(parts.rate, compact(group.rate));
    say(parts.tokens, `${compact(group.tokens)} so far`);
    parts.spark.push(group.rate);
    say(parts.kl, digits(group.kl));
    say(parts.out, percent(group.outOfBand, 2));
    say(parts.cost, dollars(group.dollars));
    say(parts.hours, group.gpuHours === null ? "" : `${digits(group.gpuHours)} GPU\u2011h`);
  });
}

const COLUMNS = ["Sampler", "State", "Version", "Switch to it", "Sessions", "Running", "KV used", "Drain"];

function makeSamplerGroup(openAtFirst) {
  return (name) => {
    const title = element("strong", {}, name), about = element("small"), body = element("tbody", { role: "rowgroup" });
    const heads = COLUMNS.map((column, i) => element("th", { role: "columnheader", scope: "col", ...(i === 1 && { class: "left" }) },
      i === 7 ? element("span", { class: "unseen" }, column) : column));
    const table = element("table", { role: "table", "aria-label": `Samplers of ${name}` },
      element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads)), body);
    const more = element("p", { class: "more" });
    const node = element("details", {}, element("summary", {}, title, about), table, more);
    node.open = openAtFirst;
    node.addEventListener("toggle", () => latest && showSamplers(latest));
    return { node, about, table, body, more };
  };
}

function makeSamplerRow(id) {
  const parts = {
    word: element("span", { class: "word" }), version: element("span"), lag: element("small"), took: element("span"), bytes: element("small"),
    sessions: element("span"), running: element("span"), waiting: element("small"), kv: element("span"), bar: makeBar(false),
    state: null, button: element("button", { type: "button", "aria-label": `Drain ${id}` }, "Drain"),
  };
  parts.state = cell("State", parts.word);
  parts.state.className = "state";
  const act = cell("", parts.button);
  act.className = "do";
  act.removeAttribute("data-label");
  parts.button.addEventListener("click", () => askToDrain(id));
  const node = element("tr", { role: "row" },
    element("th", { role: "rowheader", scope: "row" }, id), parts.state, cell("Version", parts.version, parts.lag),
    cell("Switch to it", parts.took, parts.bytes), cell("Sessions", parts.sessions), cell("Running", parts.running, parts.waiting),
    cell("KV used", parts.kv, parts.bar.node), act);
  return { node, parts };
}

function showSamplers(fleet) {
  const groups = fleet.groups.filter((group) => group.samplers.length);
  if (!groups.length) {
    keyed($("samplers"), [""], () => ({ node: element("p", { class: "empty" }, "No sampler has joined yet.") }));
    return;
  }
  keyed($("samplers"), groups.map((group) => group.name), makeSamplerGroup(fleet.num <= OPEN_UP_TO && !matchMedia("(max-width: 48rem)").matches)).forEach((part, i) => {
    const { samplers, count: states, sessions } = groups[i];
    const versions = samplers.filter((s) => s.state !== "lost").map((s) => s.version);
    const low = Math.min(...versions), high = Math.max(...versions);
    say(part.about, [
      ...STATES.filter((state) => states[state]).map((state) => `${count(states[state])} ${state}`),
      plural(sessions, "session"),
      ...(versions.length ? [low === high ? `version ${count(high)}` : `versions ${count(low)}\u2013${count(high)}`] : []),
    ].join(" \u00b7 "));
    if (!part.node.open) return; // rows of a closed group cost nothing
    const present = samplers.length - states.lost;
    const shown = samplers.slice(0, present + MAX_LOST);
    keyed(part.body, shown.map((s) => s.id), makeSamplerRow).forEach(({ parts }, j) => showSampler(parts, shown[j], fleet.newest));
    hide(part.more, shown.length === samplers.length);
    say(part.more, `and ${count(samplers.length - shown.length)} more that were lost`);
  });
}

function showSampler(parts, sampler, newest) {
  const { beat, info } = sampler, lost = sampler.state === "lost", change = sampler.switch;
  say(parts.word, sampler.state);
  mark(parts.state, "data-state", sampler.state);
  say(parts.version, lost ? MISSING : count(sampler.version));
  const lag = lost ? 0 : newest - sampler.version;
  say(parts.lag, lag > 0 ? `${count(lag)} behind` : "");
  mark(parts.lag, "class", lag > 0 ? "behind" : null);
  const phases = ["fetch", "apply", "verify", "load"].map((phase) => num(change?.[`${phase}_seconds`]) ?? 0);
  say(parts.took, change && !lost ? `${fixed(sum(phases), 1)} s, paused ${fixed(num(change.pause_seconds) ?? 0, 2)} s` : MISSING);
  const megabytes = (num(change?.num_bytes) ?? 0) / 1e6;
  say(parts.bytes, change && !lost ? `${num(change.base_version) ? "delta" : "in full"}, ${megabytes < 100 ? fixed(megabytes, 1) : count(megabytes)} MB` : "");
  say(parts.sessions, lost ? MISSING : `${count(sampler.sessions)} / ${count(info.max_sessions ?? 0)}`);
  say(parts.running, lost ? MISSING : count(beat.num_running ?? 0));
  say(parts.waiting, beat.num_waiting && !lost ? `${count(beat.num_waiting)} waiting` : "");
  say(parts.kv, lost ? MISSING : percent(beat.kv_used_fraction ?? 0, 0));
  parts.bar.show(lost ? 0 : beat.kv_used_fraction);
  hide(parts.bar.node, lost);
  hide(parts.button, sampler.state !== "ready");
}

function showCounters(counters) {
  const names = Object.keys(counters).sort();
  keyed($("counters"), names, (name) => {
    const value = element("dd");
    return { node: element("div", {}, element("dt", {}, name.replaceAll("_", " ")), value), value };
  }).forEach((counter, i) => say(counter.value, count(num(counters[names[i]]))));
}

// Draining. The token lives in this variable and nowhere else.

let token = "", draining = "";

function askToDrain(id) {
  draining = id;
  say($("drain-name"), id);
  say($("drain-said"), "");
  $("token").value = "";
  $("token").required = !token;
  $("drain-ask").hidden = Boolean(token);
  $("drain-go").disabled = false;
  $("drain").showModal();
  (token ? $("drain-go") : $("token")).focus();
}

async function drain() {
  const shown = token || $("token").value.trim();
  $("drain-go").disabled = true;
  say($("drain-said"), "");
  try {
    const answer = await fetch("/drain", {
      method: "POST", cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS),
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${shown}` },
      body: JSON.stringify({ sampler_id: draining }),
    });
    if (answer.ok) {
      token = shown;
      $("drain").close();
      poll();
      return;
    }
    if (answer.status === 401 || answer.status === 403) {
      token = "";
      $("drain-ask").hidden = false;
    }
    say($("drain-said"), (await answer.json()).error);
  } catch {
    say($("drain-said"), "The gateway did not answer; nothing is known to have changed.");
  }
  $("drain-go").disabled = false;
}

$("drain").querySelector("form").addEventListener("submit", (event) => (event.preventDefault(), drain()));
$("drain-cancel").addEventListener("click", () => $("drain").close());
$("drain").addEventListener("close", () => ($("token").value = ""));

// Polling: one request at a time, and less and less often while none succeeds.

let latest = null, answeredAt = 0, uptime = 0, numFailures = 0, nextAt = 0, timer = 0, busy = false;

function show(status) {
  const fleet = summarize(status);
  if (num(status.seconds) < uptime) { // another gateway process: its rates have nothing to do with these
    for (const row of $("groups").tBodies[0].known?.values() ?? []) row.parts.spark.forget();
  }
  uptime = num(status.seconds);
  showAlarms(status.alarms);
  showTiles(status, fleet);
  showGroups(fleet);
  showSamplers(fleet);
  showCounters(status.counters);
  latest = fleet;
}

function showLink() {
  const age = Date.now() - answeredAt;
  const state = numFailures ? "away" : !answeredAt ? "waiting" : age > STALE_MS ? "stale" : "live";
  const texts = {
    waiting: "Connecting", live: "Live",
    away: answeredAt ? "Gateway away, figures old" : "Gateway away",
    stale: "Figures are old",
  };
  mark($("link"), "data-state", state);
  mark(document.body, "data-state", state === "stale" ? "away" : state);
  say($("link-text"), texts[state]);
  const calm = $("alarms").querySelector(".sure");
  if (calm) say(calm, state === "live" ? "No alarms" : "No alarms when last heard");
  const wait = Math.max(0, Math.ceil((nextAt - Date.now()) / 1000));
  const old = answeredAt ? `${duration(age / 1000)} old` : "";
  say($("age"), state === "live" ? `up ${duration(uptime)}`
    : [old, numFailures && wait ? `retry in ${wait} s` : ""].filter(Boolean).join(" \u00b7 "));
  document.title = (state === "away" ? "\u25B2 away \u00b7 " : "") + "Sampler fleet";
}

async function poll() {
  if (busy) return;
  busy = true;
  clearTimeout(timer);
  let status = null;
  try {
    const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.ok) status = await answer.json();
  } catch { /* away: said below */ }
  busy = false;
  numFailures = status ? 0 : numFailures + 1;
  if (status) {
    answeredAt = Date.now();
    show(status);
  }
  const wait = Math.min(POLL_MS * 2 ** Math.max(0, numFailures - 1), MAX_WAIT_MS);
  nextAt = Date.now() + wait;
  timer = setTimeout(poll, wait);
  showLink();
}

document.addEventListener("visibilitychange", () => document.hidden || poll());
setInterval(showLink, 1000);
poll();
