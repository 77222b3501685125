"use strict";
// Shows the recorded episodes that stand in #data. Their texts become text nodes only: a policy may
// have sampled any markup.

const $ = (id) => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
const CONTROLS = new Set(DATA.controls);
const STRONGEST = 75; // percent of a tint over the card, so that text can be read on it
const WIDEST = Math.log(5); // log-ratio of the strongest tint
const NUM_HUES = 8;
const MISSING = "\u2013";

// Text.

const fixed = (value, places) => (value === null || value === undefined ? MISSING : value.toFixed(places));
const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const range = (ends) => (!ends.length ? MISSING : ends[0] === ends[1] ? `${ends[0]}` : `${ends[0]}\u2013${ends[1]}`);
const rewardOf = (episode) => (episode.reward === null ? "none" : String(+episode.reward.toPrecision(4)));

function digits(value) {
  if (value === null) return MISSING;
  return value !== 0 && (value < 0.001 || value >= 10000) ? value.toExponential(2) : String(+value.toPrecision(4));
}

// With signs for what has no shape of its own.
function visible(text) {
  if (!text) return "\u2205";
  return text
    .replaceAll("\t", "\u21E5")
    .replaceAll("\n", "\u23CE")
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, "\uFFFD");
}

const inText = (text) => visible(text).replaceAll("\u23CE", "\u23CE\n").replaceAll("\u21E5", "\u21E5\t");
const inCell = (text) => visible(text).replaceAll(" ", "\u2423");

// Elements.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function tint(node, name, share) {
  node.style.setProperty("--tint", `var(--${name})`);
  node.style.setProperty("--share", `${(STRONGEST * Math.min(Math.max(share, 0), 1)).toFixed(1)}%`);
  return node;
}

// Colours. Each has what is said of a token, and a legend of what occurs.

const GROUPS = [...new Set(DATA.episodes.map((episode) => episode.group))].sort();
const hueOf = (number) => `hue-${number % NUM_HUES}`;

function ratioTint(node, gap) {
  return tint(node, gap > 0 ? "high" : "low", Math.abs(gap) / WIDEST);
}

const COLOURS = {
  ratio: {
    paint: (node, episode, n) => episode.trainer_logp && ratioTint(node, episode.trainer_logp[n] - episode.sampler_logp[n]),
    legend: () =>
      [1 / 5, 1 / 2, 1, 2, 5].map((ratio) =>
        ratioTint(element("li", {}, { [1 / 5]: "\u2264 1/5", [1 / 2]: "1/2", 1: "ratio 1", 2: "2", 5: "\u2265 5" }[ratio]), Math.log(ratio)),
      ),
  },
  probability: {
    paint: (node, episode, n) => tint(node, "rare", -episode.sampler_logp[n] / Math.log(100)),
    legend: () =>
      [1, 0.5, 0.1, 0.01].map((p) =>
        tint(element("li", {}, p === 1 ? "probability 1" : p === 0.01 ? "\u2264 0.01" : String(p)), "rare", -Math.log(p) / Math.log(100)),
      ),
  },
  group: {
    paint: (node, episode) => tint(node, hueOf(GROUPS.indexOf(episode.group)), 0.8),
    legend: () => GROUPS.map((group, i) => tint(element("li", {}, group), hueOf(i), 0.8)),
  },
  version: {
    paint: (node, episode, n) => tint(node, hueOf(versionsOf(episode)[n]), 0.8),
    legend: (episode) =>
      [...new Set(versionsOf(episode))].sort((a, b) => a - b).map((version) => tint(element("li", {}, `version ${version}`), hueOf(version), 0.8)),
  },
};

// Of each sampled token.
function versionsOf(episode) {
  return (episode.versionOf ??= episode.spans.flatMap(([version, start, end]) => Array(end - start).fill(version)));
}

// The list.

const FILTERS = {
  update: (episode) => String(episode.update),
  group: (episode) => episode.group,
  ending: (episode) => episode.ending,
  reward: rewardOf,
};
const byNumber = new Intl.Collator("en", { numeric: true });
let current = null; // the episode that is read
let colour = "ratio";

function makeFilters() {
  for (const [name, value] of Object.entries(FILTERS)) {
    const values = [...new Set(DATA.episodes.map(value))].sort(byNumber.compare);
    const select = $(`by-${name}`);
    select.append(element("option", { value: "" }, "all"), ...values.map((text) => element("option", { value: `=${text}` }, text)));
    select.addEventListener("change", filter);
  }
  $("filters").addEventListener("submit", (event) => event.preventDefault());
}

function makeRow(episode) {
  const open = element("button", { type: "button", tabindex: "-1" }, `${episode.update}.${episode.number}`);
  open.setAttribute("aria-label", `Episode ${episode.number} of update ${episode.update}`);
  const chip = tint(element("span", { class: "chip", "aria-hidden": "true" }), hueOf(GROUPS.indexOf(episode.group)), 1);
  const cells = [
    [chip, episode.group],
    [rewardOf(episode)],
    [episode.ending],
    [String(episode.turns)],
    [String(episode.format_errors)],
    [`${episode.sampled.length} / ${episode.tokens.length}`],
    [fixed(episode.mean_gap, 4)],
    [fixed(episode.max_gap, 4)],
    [range(episode.versions)],
  ];
  episode.row = element(
    "tr",
    {},
    element("th", { scope: "row" }, open),
    ...cells.map((content, i) => element("td", i === 0 || i === 2 ? { class: "left" } : {}, ...content)),
  );
  episode.row.addEventListener("click", () => show(episode));
  episode.open = open;
  return episode.row;
}

const visibleEpisodes = () => DATA.episodes.filter((episode) => !episode.row.hidden);

function filter() {
  for (const episode of DATA.episodes) {
    episode.row.hidden = Object.entries(FILTERS).some(([name, value]) => {
      const wanted = $(`by-${name}`).value;
      return wanted && wanted !== `=${value(episode)}`;
    });
  }
  const left = visibleEpisodes();
  const more = DATA.num_recorded > DATA.episodes.length ? `, ${DATA.num_recorded} recorded` : "";
  $("shown").textContent = `${left.length} of ${plural(DATA.episodes.length, "episode")}${more}`;
  $("none").hidden = left.length > 0;
  $("episode").hidden = !left.length;
  if (left.length && !left.includes(current)) show(left[0]);
}

function walkList(event) {
  const left = visibleEpisodes(), at = left.indexOf(current);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: left.length - 1 }[event.key];
  if (to === undefined || !left[to]) return;
  event.preventDefault();
  show(left[to]);
  left[to].open.focus();
}

// One episode.

function show(episode) {
  if (current) {
    current.row.removeAttribute("aria-current");
    current.open.tabIndex = -1;
  }
  current = episode;
  episode.row.setAttribute("aria-current", "true");
  episode.open.tabIndex = 0;
  $("episode-title").textContent = `Update ${episode.update}, ${episode.task}`;
  const facts = [
    `${episode.group} (${DATA.accelerators[episode.group] ?? "not in the run's record"})`,
    episode.samplers.length ? `drawn by ${episode.samplers.join(", ")}` : "drawn by nobody",
    `session ${episode.session}`,
    `trajectory group ${episode.sequence}`,
    `${episode.seconds} s`,
    `trainer at version ${episode.version}`,
  ];
  if (!episode.trainer_logp) facts.push("not trained on");
  if (episode.failure) facts.push(`failure: ${episode.failure}`);
  $("facts").textContent = facts.join(" \u00B7 ");
  const places = new Map(episode.sampled.map((position, n) => [position, n]));
  const masked = new Set(episode.masked);
  episode.places = places;
  $("text").replaceChildren(
    ...episode.tokens.map((id, position) => {
      const n = places.get(position);
      const names = ["token"];
      if (n !== undefined) names.push("sampled");
      if (masked.has(n)) names.push("masked");
      if (CONTROLS.has(id)) names.push("control");
      return element(
        "span",
        { class: names.join(" "), role: "option", id: `at-${position}`, "aria-selected": "false" },
        inText(DATA.texts[id]),
      );
    }),
  );
  $("text").scrollTop = 0;
  paint();
  select(episode.sampled[0] ?? 0);
}

function paint() {
  const { paint: paintOne, legend } = COLOURS[colour];
  for (const [position, n] of current.places) {
    const node = $(`at-${position}`);
    node.removeAttribute("style");
    paintOne(node, current, n);
  }
  const marks = [element("li", { class: "given" }, "given")];
  if (current.masked.length) marks.push(element("li", { class: "masked" }, "masked"));
  $("legend").replaceChildren(...legend(current), ...marks);
}

// One token.

let selected = 0;

function select(position, { scroll = false } = {}) {
  $(`at-${selected}`)?.setAttribute("aria-selected", "false");
  selected = position;
  const node = $(`at-${position}`);
  if (!node) return;
  node.setAttribute("aria-selected", "true");
  $("text").setAttribute("aria-activedescendant", node.id);
  if (scroll) node.scrollIntoView({ block: "nearest" });
  describe(position);
}

function describe(position) {
  const episode = current, id = episode.tokens[position], n = episode.places.get(position);
  $("token-title").textContent = inCell(DATA.texts[id]);
  const rows = [["Id", String(id)], ["Position", String(position)]];
  if (n === undefined) rows.push(["Origin", "given: prompt or observation"]);
  else {
    const q = episode.sampler_logp[n], p = episode.trainer_logp?.[n] ?? null;
    const version = versionsOf(episode)[n];
    rows.push(
      ["Sampler log-prob", `${fixed(q, 4)} (${digits(Math.exp(q))})`],
      ["Trainer log-prob", p === null ? "not trained on" : `${fixed(p, 4)} (${digits(Math.exp(p))})`],
      ["Ratio", p === null ? MISSING : digits(Math.exp(p - q))],
      ["Masked", p === null ? MISSING : episode.masked.includes(n) ? "yes" : "no"],
      ["Version", `${version} (${plural(episode.version - version, "version")} behind)`],
    );
  }
  $("token").replaceChildren(
    ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
  describeCandidates(episode, n);
}

// Of each sampled token's candidates.
function startsOf(episode) {
  let sum = 0;
  return (episode.starts ??= episode.shown.map((num) => (sum += num) - num));
}

function describeCandidates(episode, n) {
  $("candidates").hidden = n === undefined || !episode.shown[n];
  $("rest").textContent = "";
  if (n === undefined) return;
  const start = startsOf(episode)[n], end = start + episode.shown[n];
  const drawn = episode.tokens[episode.sampled[n]];
  const ids = episode.ids.slice(start, end), logp = episode.logp.slice(start, end);
  $("candidates").tBodies[0].replaceChildren(
    ...ids.map((id, k) => {
      const share = element("td", {}, digits(Math.exp(logp[k])));
      share.style.setProperty("--share", `${(100 * Math.exp(logp[k])).toFixed(1)}%`);
      const name = element("td", { class: "text left" }, inCell(DATA.texts[id]));
      return element("tr", id === drawn ? { class: "drawn" } : {}, name, element("td", {}, String(id)), share);
    }),
  );
  const said = [];
  const more = episode.sizes[n] - ids.length, mass = logp.reduce((sum, value) => sum + Math.exp(value), 0);
  if (more > 0) said.push(`${more} more candidates`);
  if (!ids.includes(drawn)) said.push("the token drawn is outside the set");
  if (mass < 0.999) said.push(`probability ${digits(1 - mass)} is not shown`);
  $("rest").textContent = said.join(", ");
}

function walkText(event) {
  const { tokens, sampled, places } = current;
  const starts = sampled.filter((position) => !places.has(position - 1));
  const to = {
    ArrowRight: selected + 1,
    ArrowLeft: selected - 1,
    ArrowDown: starts.find((position) => position > selected),
    ArrowUp: starts.findLast((position) => position < selected),
    Home: 0,
    End: tokens.length - 1,
  }[event.key];
  if (to === undefined || to < 0 || to >= tokens.length) return;
  event.preventDefault();
  select(to, { scroll: true });
}

const positionOf = (event) => {
  const node = event.target.closest(".token");
  return node ? Number(node.id.slice(3)) : null;
};

function start() {
  document.title = `Episodes of ${DATA.run}`;
  $("run").textContent = DATA.run;
  const numbers = new Map();
  for (const episode of DATA.episodes) {
    episode.number = (numbers.get(episode.update) ?? 0) + 1;
    numbers.set(episode.update, episode.number);
  }
  const list = $("list").querySelector("tbody");
  list.append(...DATA.episodes.map(makeRow));
  list.addEventListener("keydown", walkList);
  makeFilters();
  $("colours").addEventListener("change", (event) => {
    colour = event.target.value;
    paint();
  });
  const text = $("text");
  text.addEventListener("keydown", walkText);
  text.addEventListener("click", (event) => {
    const position = positionOf(event);
    if (position !== null) select(position);
  });
  text.addEventListener("mouseover", (event) => {
    const position = positionOf(event);
    if (position !== null) describe(position);
  });
  text.addEventListener("mouseleave", () => describe(selected));
  filter();
}

start();
